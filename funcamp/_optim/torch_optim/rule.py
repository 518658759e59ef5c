"""The form of an update rule, and what several rules share.

A rule is two functions of one tensor: `init`, the state before the first step, and `step`. They write into nothing. The
class's arguments are `h`, by torch's names: each a bool, a text, a float, or a float64 tensor of shape (); betas is a
tuple of such. `step` gets the gradient of what is minimized; a complex parameter comes as its real view. An entry
`step` is counted by the caller.

A new rule: copy `adagrad.py`, and add torch's class, whose names and defaults the arguments are, to `RULES` in
`__init__.py`, and with options to `tests/support/optimizers.py`, over which the tests go. What torch lacks is no rule:
any class of `torch.optim.Optimizer` is run as it is (`_optim/foreign`), and an object with `init` and `update` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.arithmetic import Number, add, addcmul, is_zero, times
from funcamp._scaler.state import widen

#: What a rule keeps of one parameter, by torch's names.
State: TypeAlias = dict[str, Tensor]


class Arguments:
    """A class's arguments in one step, by their names. Dynamo does not trace a SimpleNamespace of them."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class UpdateRule(NamedTuple):
    """A class of torch.optim as two functions of one tensor."""

    init: Callable[[Tensor, Arguments], State]
    step: Callable[[Tensor, Tensor, State, Arguments], tuple[Tensor, State]]
    """From the parameter, its gradient and its state to both after the step."""
    arguments: tuple[str, ...]
    """The names of the arguments that it reads; any other one is refused."""
    elementwise: bool = True
    """Whether it treats each element by itself, so that it may step many parameters in one tensor."""
    takes_complex: bool = True
    dims: int | None = None
    """The number of dimensions that a parameter must have; None for any."""
    constants: tuple[str, ...] = ()
    """Numbers that Python reads: no tensors."""


def zeros(param: Tensor, *names: str) -> State:
    """Return zeros under some names."""
    return {name: torch.zeros_like(param) for name in names}


def count_and_zeros(param: Tensor, *names: str) -> State:
    """Return a count of steps, and zeros under some names."""
    return {"step": scalar(0.0, param), **zeros(param, *names)}


def scalar(number: Number, like: Tensor) -> Tensor:
    """Return a number as torch keeps counts: in the default dtype, shape ()."""
    return torch.as_tensor(number, device=like.device).to(torch.get_default_dtype(), copy=True)


def count(state: State) -> Tensor:
    """Return the number of this step, from 1, as wide as Python's numbers."""
    return widen(state["step"]) + 1


def with_l2(grad: Tensor, param: Tensor, h: Arguments) -> Tensor:
    """Return the gradient with that of an L2 penalty."""
    return grad if is_zero(h.weight_decay) else add(grad, param, h.weight_decay)


def decayed(param: Tensor, h: Arguments) -> Tensor:
    """Return the parameter after a decoupled weight decay."""
    return param if is_zero(h.weight_decay) else times(param, 1 - h.lr * h.weight_decay)


def with_decay(param: Tensor, grad: Tensor, h: Arguments) -> tuple[Tensor, Tensor]:
    """Return the parameter and the gradient after the weight decay, which is decoupled or an L2 penalty."""
    if h.decoupled_weight_decay:
        return decayed(param, h), grad
    return param, with_l2(grad, param, h)


def average_of_squares(average: Tensor, grad: Tensor, beta: Number) -> Tensor:
    """Return beta * average + (1 - beta) * grad**2."""
    return addcmul(times(average, beta), grad, grad, 1 - beta)
