"""Types for funcamp's signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

#: Nested dicts, lists, tuples, NamedTuples and registered dataclasses of tensors; None is an empty leaf.
#: A batch may have other leaves too.
Tree: TypeAlias = Any
#: The arguments of a call that is passed on, by position and by name.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
#: A pure step: from the state and a batch to the next state and the metrics.
Step: TypeAlias = Callable[[Tree, Tree], tuple[Tree, Tree]]
#: What a state_dict() of torch or of this package returns: values by name.
StateDict: TypeAlias = dict[str, Any]
#: A pure function of the found_inf flag, float32, shape (): for example a MAX over ranks.
Reduce: TypeAlias = Callable[[Tensor], Tensor]


class Operation(Protocol):
    """An operation or function of torch, as a mode gets it: `aten.add.Tensor`, torch.cond, `Tensor.add`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it."""


class VmapInfo(Protocol):
    """What the `vmap` method of an autograd.Function gets about its call."""

    batch_size: int


class FunctionContext(Protocol):
    """What an autograd.Function finds in ctx, in `setup_context` and in `backward`."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for `backward`."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether `backward` gets zeros instead of None."""


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module: float16."""
    return str(dtype).removeprefix("torch.")
