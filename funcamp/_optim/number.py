"""A tensor that an optimizer's class takes for a Python number.

torch.optim's classes check their hyperparameters (`0.0 <= lr`), branch on them (`if weight_decay != 0`) and
pass them where torch takes numbers only (`alpha=-lr`). A `Number` is a float for all of that code, and its
arithmetic is that of a tensor, so that the class needs no branch of its own for tensors, and takes none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from funcamp._scaler.precision import widen


class Use:
    """What one run of a class may ask of its numbers, and what it asked."""

    def __init__(self, class_name: str, unused: frozenset[str] = frozenset()) -> None:
        self.class_name = class_name
        self.unused = unused
        """Labels of the numbers that are 0 in this run, such as "momentum" or "betas[0]"."""
        self.asked: set[str] = set()
        """Labels of the numbers that the step compared with 0."""
        self.constructing = True
        """Whether the constructor runs, which checks the ranges of its arguments; later the step."""


def _refusal(number: Number, reason: str) -> TypeError:
    return TypeError(
        f"stateless: {number.label} must be a number, because {number.use.class_name} {reason} in "
        "Python; got a tensor or a schedule: make another optimizer for another value"
    )


class Number(float):
    """A hyperparameter that is a tensor of shape (): its arithmetic gives tensors.

    The float is an example of its value. The constructor compares the example. The step may compare only
    with 0, and the answer is that of the example: a hyperparameter that is a tensor is in use. Any other
    question about the value raises TypeError. The tensor is float64, as Python's numbers are.
    """

    label: str
    tensor: Tensor
    use: Use

    def __new__(cls, label: str, example: float, tensor: Tensor, use: Use) -> Number:
        """Make a number from an example of its value and the tensor that holds it."""
        number = super().__new__(cls, example)
        number.label = label
        number.tensor = widen(tensor.detach())
        number.use = use
        return number

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return bool(self._compare(operator.ne, 0.0))

    def _compare(self, compare: Callable[[float, float], bool], other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        example = float.__float__(self)
        if self.use.constructing:
            return compare(example, float.__float__(other) if isinstance(other, Number) else other)
        if isinstance(other, Number) or other != 0:
            raise _refusal(self, f"compares it with {'another' if isinstance(other, Number) else other}")
        self.use.asked.add(self.label)
        return compare(0.0 if self.label in self.use.unused else example, 0.0)

    def _read(self, *_: Any) -> Any:
        raise _refusal(self, "reads its value")

    __float__ = __int__ = __index__ = __trunc__ = __floor__ = __ceil__ = __round__ = _read
    __divmod__ = __rdivmod__ = _read


def _comparison(compare: Callable[[float, float], bool]) -> Any:
    return lambda self, other: self._compare(compare, other)


def _arithmetic(name: str) -> Any:
    apply = getattr(operator, name)
    return lambda self, other: apply(self.tensor, as_tensors(other))


def _reflected(name: str) -> Any:
    apply = getattr(operator, name)
    return lambda self, other: apply(as_tensors(other), self.tensor)


def _unary(name: str) -> Any:
    apply = getattr(operator, name)
    return lambda self: apply(self.tensor)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(_name))
    setattr(Number, f"__r{_name}__", _reflected(_name))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _unary(_name))


def as_tensors(value: Any) -> Any:
    """Replace a `Number` by its tensor, also in tuples, lists and dicts of arguments."""
    if isinstance(value, Number):
        return value.tensor
    if type(value) in (tuple, list):
        return type(value)([as_tensors(item) for item in value])
    if type(value) is dict:
        return {name: as_tensors(item) for name, item in value.items()}
    return value


def has_number(value: Any) -> bool:
    """Return whether an argument is a `Number`, or a list with one."""
    if isinstance(value, (tuple, list)):
        return any(has_number(item) for item in value)
    return isinstance(value, Number)
