"""A tensor that an optimizer's class takes for a Python number.

torch.optim's classes check their hyperparameters (`0.0 <= lr`), branch on them (`if weight_decay != 0`) and
pass them where torch takes numbers only (`alpha=-lr`). A `Number` is a float for all of that code, and its
arithmetic is that of a tensor, so that the class needs no branch of its own for tensors, and takes none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from funcamp._scaler.precision import widen


class Comparisons:
    """The comparisons of numbers in one run of a class: what they answer, and which were with 0."""

    def __init__(self, class_name: str, zero_labels: frozenset[str] = frozenset()) -> None:
        self.class_name = class_name
        self.zero_labels = zero_labels
        """Labels of the numbers that are 0 in this run, such as "momentum" or "betas[0]"."""
        self.labels_compared_with_zero: set[str] = set()
        """Labels of the numbers that the step compared with 0."""
        self.is_constructing = True
        """Whether the constructor runs, which checks the ranges of its arguments; later the step."""


def _refusal(number: Number, reason: str) -> TypeError:
    return TypeError(
        f"stateless: {number.label} must be a number, because {number.comparisons.class_name} {reason} in "
        "Python; got a tensor or a schedule: make another optimizer for another value"
    )


def _comparison(compare: Callable[[float, float], bool]) -> Any:
    """Return the method of `Number` for one comparison operator."""
    return lambda self, other: self._compare(compare, other)


def _arithmetic(compute: Callable[[Any, Any], Any]) -> Any:
    """Return the method of `Number` for one operator, such as __add__."""
    return lambda self, other: compute(self.tensor, numbers_to_tensors(other))


def _reflected(compute: Callable[[Any, Any], Any]) -> Any:
    """Return the method of `Number` for one operator whose left operand is another value, such as __radd__."""
    return lambda self, other: compute(numbers_to_tensors(other), self.tensor)


def _unary(compute: Callable[[Any], Any]) -> Any:
    """Return the method of `Number` for one operator without another operand."""
    return lambda self: compute(self.tensor)


class Number(float):
    """A hyperparameter that is a tensor of shape (): its arithmetic gives tensors.

    The float is an example of its value. The constructor compares the example. The step may compare only
    with 0, and the answer is that of the example: a hyperparameter that is a tensor is in use. Any other
    question about the value raises TypeError. The tensor is float64, as Python's numbers are.
    """

    label: str
    tensor: Tensor
    comparisons: Comparisons

    def __new__(cls, label: str, example: float, tensor: Tensor, comparisons: Comparisons) -> Number:
        """Make a number from an example of its value and the tensor that holds it."""
        number = super().__new__(cls, example)
        number.label = label
        number.tensor = widen(tensor.detach())
        number.comparisons = comparisons
        return number

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return bool(self._compare(operator.ne, 0.0))

    def _compare(self, compare: Callable[[float, float], bool], other: object) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        # `float.__float__`, because `__float__` of this class raises.
        example = float.__float__(self)
        if self.comparisons.is_constructing:
            other_example = float.__float__(other) if isinstance(other, Number) else other
            return compare(example, other_example)
        if isinstance(other, Number) or other != 0:
            raise _refusal(self, f"compares it with {'another' if isinstance(other, Number) else other}")
        self.comparisons.labels_compared_with_zero.add(self.label)
        is_zero = self.label in self.comparisons.zero_labels
        return compare(0.0 if is_zero else example, 0.0)

    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    __add__ = _arithmetic(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _arithmetic(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _arithmetic(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _arithmetic(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _arithmetic(operator.pow)
    __rpow__ = _reflected(operator.pow)

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)

    def _refuse_reading(self, *_: object) -> NoReturn:
        raise _refusal(self, "reads its value")

    # Each of these would read the tensor on the host.
    __float__ = _refuse_reading
    __int__ = _refuse_reading
    __index__ = _refuse_reading
    __trunc__ = _refuse_reading
    __floor__ = _refuse_reading
    __ceil__ = _refuse_reading
    __round__ = _refuse_reading
    __divmod__ = _refuse_reading
    __rdivmod__ = _refuse_reading


def numbers_to_tensors(value: Any) -> Any:
    """Replace a `Number` by its tensor, also in tuples, lists and dicts of arguments."""
    if isinstance(value, Number):
        return value.tensor
    if type(value) in (tuple, list):
        return type(value)([numbers_to_tensors(item) for item in value])
    if type(value) is dict:
        return {name: numbers_to_tensors(item) for name, item in value.items()}
    return value


def has_number(value: object) -> bool:
    """Return whether an argument is a `Number`, or a list with one."""
    if isinstance(value, (tuple, list)):
        return any(has_number(item) for item in value)
    return isinstance(value, Number)
