"""How the linear layers of a step multiply: as torch does, or in the format of a layer of funcamp (`float8`).

Such a layer (`float8`) has variables, which a step remembers and a skipped step restores; a tape, whose record moves
them; and a context around the forward and backward passes, in which the module's linear layers call its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcamp._autograd.loss import Loss
from funcamp._autograd.tape import Tape
from funcamp._layers import layer
from funcamp._step.state import TrainState
from funcamp._storage.inputs import Cast, Inputs
from funcamp._storage.policy import Policy
from funcamp._types import Tree


class ProductContext(Protocol):
    """Context manager: the products of one step, around the forward and backward passes of all micro-batches."""

    tape: Tape

    def begin(self, inputs: Sequence[Tensor], zeros: Tree) -> None:
        """Take the inputs of the next forward pass (`Inputs.values`), and the zeros of the tape."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class Products(Protocol):
    """The products of a policy in a step."""

    def described(self) -> str:
        """Return which layers they are in, as the end of a step's repr."""
        ...

    def init(self, inputs: Inputs, device: torch.device) -> Tree:
        """Return the variables before the first step; `()` if there are none."""
        ...

    def prepare(self, state: TrainState, inputs: Inputs, cast: Cast) -> ProductContext:
        """Return the context of a step, with all that its micro-batches share.

        inputs: of the loss.
        cast: the parameters, from `Inputs.cast`.
        """
        ...

    def after(self, state: TrainState, record: Tree) -> Tree:
        """Return the next variables, from the record of all micro-batches and ranks."""
        ...

    def scales(self, state: TrainState, inputs: Inputs) -> dict[str, Tensor]:
        """Return the scales among the variables by the path of their layer."""
        ...


class PlainProducts:
    """torch's own products. A state that has another step's variables keeps them."""

    def described(self) -> str:
        """Return nothing."""
        return ""

    def init(self, inputs: Inputs, device: torch.device) -> Tree:  # noqa: ARG002
        """Return no variables."""
        return ()

    def prepare(self, state: TrainState, inputs: Inputs, cast: Cast) -> _PlainContext:  # noqa: ARG002
        """Return a context that changes nothing; a new one, because Dynamo enters none from outside its graph."""
        return _PlainContext()

    def after(self, state: TrainState, record: Tree) -> Tree:  # noqa: ARG002
        """Return the state's variables as they are."""
        return state.float8

    def scales(self, state: TrainState, inputs: Inputs) -> dict[str, Tensor]:  # noqa: ARG002
        """Return no scales."""
        return {}


class _PlainContext:
    """A context that changes nothing, with a tape without records."""

    tape = Tape(())

    def begin(self, inputs: Sequence[Tensor], zeros: Tree) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def products_of(policy: Policy, loss_fn: Loss) -> Products:
    """Return the products of a policy in the layers of a loss.

    Raises:
        ValueError: the policy names a layer, and the loss is not of `module_loss`.
    """
    if policy.float8 is None:
        return PlainProducts()
    products: Products = layer("float8.layers").Float8Layers(policy, loss_fn)
    return products
