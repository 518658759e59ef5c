"""A tensor that an optimizer's class takes for a Python number.

A class checks its hyperparameters (`0.0 <= lr`), branches on them (`if weight_decay != 0`), counts its steps
(`group["step"] += 1`), and passes numbers where torch takes no tensors (`alpha=-lr`). A `Number` is a float for all of
that code, because torch's parser of arguments accepts nothing else, and its arithmetic is that of a tensor. So the
class needs no branch for tensors, and takes none.

C code reads the float without a call of a method. That of a number in a state is no value: a trial gives it several
floats, and refuses a class whose step depends on them (`independence.py`). That of a hyperparameter is an example, and
a trial compares with a loop in which the number changes (`long_trial.py`); on branches that this loop does not reach it
is no value either.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.decisions import Decisions
from funcamp._scaler.precision import widen

#: An operator of Python or a function of torch, on numbers or on tensors.
Compute: TypeAlias = Callable[..., Any]

#: How the label of a computed number begins.
_FROM = "what it computes from "


def _refuse(number: Number, reason: str) -> NoReturn:
    """Raise TypeError: the class does with a number what a tensor cannot do."""
    if number.is_hyperparameter:
        number.decisions.refuse(
            f"{number.label} must be a number, because {number.decisions.class_name} {reason} in "
            "Python; got a tensor or a schedule: make another optimizer for another value"
        )
    number.decisions.refuse_class(
        f"its step {reason} in Python: {number.label}, a number that changes in training and so is a tensor; compute "
        "with it (x ** 0.5, min, max, math.sqrt, `if`), or use the optimizer in an ordinary loop with "
        "funcamp.GradScaler"
    )


def _comparison(compare: Compute) -> Any:
    """Return the method of `Number` for one comparison operator."""
    return lambda self, other: self._compare(compare, other)


def _arithmetic(compute: Compute) -> Any:
    """Return the method of `Number` for one operator, such as __add__."""
    return lambda self, other: _computed(compute, self, other)


def _reflected(compute: Compute) -> Any:
    """Return the method of `Number` for one operator whose left operand is another value, such as __radd__."""
    return lambda self, other: _computed(compute, other, self)


def _unary(compute: Compute) -> Any:
    """Return the method of `Number` for one operator without another operand."""
    return lambda self: _computed(compute, self)


class Number(float):
    """A number that changes in training: a hyperparameter, a count, or what is computed from them; it is a tensor.

    The float is an example of its value; `Decisions.unknown_example` if none is known, or the run hides it. The
    constructor compares the example. A comparison in the step is a question (`Decisions`), and so is the truth of the
    number. Reading the value raises TypeError. The tensor is float64, as Python's numbers are.

    Args:
        label: how errors call it.
        example: an example of its value.
        tensor: its value: float64, shape (), no gradient. `as_number` takes any tensor of one element.
        decisions: those of the run.
        key: its number there; None for a new one.
        is_hyperparameter: whether a user gave it.
        is_integral: whether it is a whole number, whatever its value.
    """

    #: numpy leaves arithmetic with it to the methods below.
    __array_ufunc__ = None

    example: float
    label: str
    tensor: Tensor
    decisions: Decisions
    key: int
    is_hyperparameter: bool
    is_integral: bool

    def __new__(
        cls,
        label: str,
        example: float,
        tensor: Tensor,
        decisions: Decisions,
        key: int | None = None,
        *,
        is_hyperparameter: bool = False,
        is_integral: bool = False,
    ) -> Number:
        """Make a number from an example of its value and the tensor that holds it."""
        number = super().__new__(cls, decisions.unknown_example if decisions.hides_examples else example)
        number.example = example
        number.label = label
        number.tensor = tensor
        number.decisions = decisions
        number.key = decisions.new_key() if key is None else key
        number.is_hyperparameter = is_hyperparameter
        number.is_integral = is_integral
        return number

    def __repr__(self) -> str:
        return f"<{self.label}>"

    def __deepcopy__(self, memo: object) -> Number:
        return self

    def __reduce__(self) -> NoReturn:
        _refuse(self, "copies or saves it")

    def __bool__(self) -> bool:
        return bool(self._compare(operator.ne, 0.0))

    def _compare(self, compare: Compute, other: object) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented  # the tensor compares, as with a number of Python
        if _is_array(other):
            return _answers_for_array(self, compare, other)
        other = _of_python(other)
        if not isinstance(other, (int, float)):
            if isinstance(other, numbers.Number):  # its own comparison would read the float
                _refuse(self, f"compares it with a {type(other).__name__}")
            return NotImplemented
        other_example = other.example if isinstance(other, Number) else other
        proposal = bool(compare(self.example, other_example))
        decisions = self.decisions
        if decisions.is_constructing:
            return decisions.answer_in_constructor(self.label, proposal)
        # What holds for 0 says nothing of numbers below it.
        asks_for_zero = compare in (operator.eq, operator.ne) and not isinstance(other, Number) and other == 0
        if self.is_hyperparameter and asks_for_zero:
            decisions.compared_with_zero.add(self.label)
            if self.label in decisions.treated_as_zero:
                return compare(0.0, 0.0)
            if self.label in decisions.treated_as_nonzero:
                return proposal
        if not isinstance(other, Number) and float(other).is_integer():
            decisions.thresholds.add(int(other))
        # Two numbers that are computed alike may be compared the other way round.
        key = decisions.key((compare.__name__, self.key, _key_of(other, decisions)))
        return decisions.ask(key, lambda: compare(self.tensor, numbers_to_tensors(other)).reshape(()), proposal)

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
    __floor__ = _unary(torch.floor)
    __ceil__ = _unary(torch.ceil)
    __trunc__ = _unary(torch.trunc)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __and__(self, other: int) -> Any:
        """Return the last bits of a whole number: a mask of them is one less than a power of two."""
        if not self.is_integral or type(other) is not int or other < 0 or other & (other + 1):
            _refuse(self, "takes its bits")
        return self % (other + 1)

    __rand__ = __and__

    def __rshift__(self, other: int) -> Any:
        if not self.is_integral or type(other) is not int:
            _refuse(self, "shifts it")
        return self // 2**other

    def __round__(self, digits: int | None = None) -> Any:  # type: ignore[override]  # a number, and no int
        if digits:
            _refuse(self, "rounds it to digits")  # torch.round multiplies first, so that it rounds ties otherwise
        return computed(torch.round, self)

    def _refuse_reading(self, *_: object) -> NoReturn:
        _refuse(self, "reads its value" if self.is_hyperparameter else "reads a value")

    def _refuse_text(self, *_: object) -> NoReturn:
        _refuse(self, "writes its value into a text")

    # Each of these would read the tensor on the host.
    __str__ = _refuse_text
    __format__ = _refuse_text
    __hash__ = _refuse_reading
    __float__ = _refuse_reading
    __int__ = _refuse_reading
    __index__ = _refuse_reading
    is_integer = _refuse_reading
    as_integer_ratio = _refuse_reading
    hex = _refuse_reading


def _key_of(value: object, decisions: Decisions) -> Hashable:
    """Return what stands for an operand in the key of an expression."""
    return value.key if isinstance(value, Number) else decisions.key(("constant", value))


def _computed(compute: Compute, *operands: Any) -> Any:
    """Return the result of an operator on numbers: another number.

    With a tensor it is the tensor's operator that computes, as with a number of Python: it may round otherwise than one
    on two tensors.
    """
    if any(isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    operands = tuple(map(_of_python, operands))
    for operand in operands:
        if isinstance(operand, (int, float)):
            continue
        if isinstance(operand, numbers.Number) or _is_array(operand):  # its own arithmetic would read the float
            _refuse(_first_number(operands), f"computes with it and a {type(operand).__name__}")
        return NotImplemented
    if compute in _DIVISIONS:
        _ask_divisor(operands[1])
    elif compute is operator.pow and not isinstance(operands[1], Number) and operands[1] < 0:
        _ask_divisor(operands[0])
    return computed(compute, *operands)


# numpy's scalars and arrays.


def _is_array(value: object) -> bool:
    """Return whether a value is an array of numpy with elements; its scalars and arrays of shape () are numbers."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", ()) != ()


def _of_python(value: Any) -> Any:
    """Return a number of numpy as one of Python, any other value as it is."""
    is_numpys = type(value).__module__ == "numpy" and hasattr(value, "item")
    return value.item() if is_numpys and not _is_array(value) else value


def _answers_for_array(number: Number, compare: Compute, array: Any) -> Any:
    """Return an array with the answer to the comparison with each element, as numpy does."""
    answers = array.astype(bool)
    for index, element in enumerate(array.reshape(-1).tolist()):
        answers.reshape(-1)[index] = compare(number, element)
    return answers


_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def _ask_divisor(divisor: float) -> None:
    """Raise ZeroDivisionError if a number is 0 and the class catches that error; a tensor would give inf or NaN."""
    if isinstance(divisor, Number) and divisor.decisions.asks_divisors and divisor == 0:
        raise ZeroDivisionError


def computed(compute: Compute, *operands: float, **options: Any) -> Number:
    """Return what a function of torch, or an operator, makes of numbers: another number."""
    number = _first_number(operands)
    decisions = number.decisions
    tensor = compute(*map(numbers_to_tensors, operands), **options)
    key = (compute.__name__, *[_key_of(operand, decisions) for operand in operands], *options.items())
    label = number.label if number.label.startswith(_FROM) else f"{_FROM}{number.label}"
    examples = [operand.example if isinstance(operand, Number) else operand for operand in operands]
    example = _example(compute, examples, decisions.unknown_example)
    is_integral = compute.__name__ in _INTEGRAL and all(map(_is_integral, operands))
    return Number(label, example, tensor, decisions, decisions.key(key), is_integral=is_integral)


def _first_number(operands: Iterable[object]) -> Number:
    return next(operand for operand in operands if isinstance(operand, Number))


#: Functions whose result is a whole number if their operands are.
_INTEGRAL = {
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "neg",
    "pos",
    "abs",
    "min",
    "max",
    "floor",
    "ceil",
    "trunc",
    "round",
}


def _is_integral(operand: float) -> bool:
    return operand.is_integral if isinstance(operand, Number) else float(operand).is_integer()


def _example(compute: Compute, operands: list[float], unknown: float) -> float:
    """Return the result of an operator for examples; `unknown` for a function of torch, or if there is no result."""
    if compute.__module__ != "_operator":
        return unknown
    try:
        result = compute(*operands)
    except (ArithmeticError, ValueError):
        return unknown
    return unknown if isinstance(result, complex) or math.isnan(result) else float(result)


def numbers_to_tensors(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Replace a `Number` by its tensor, in a dtype if one is given, also in tuples, lists and dicts of arguments."""
    if isinstance(value, Number):
        return value.tensor if dtype is None else value.tensor.to(dtype)
    if type(value) in (tuple, list):
        return type(value)([numbers_to_tensors(item, dtype) for item in value])
    if type(value) is dict:
        return {name: numbers_to_tensors(item, dtype) for name, item in value.items()}
    return value


def has_number(value: object) -> bool:
    """Return whether an argument is a `Number`, or a list with one."""
    kind = type(value)
    if kind is Number:
        return True
    if kind is tuple or kind is list:
        for item in value:  # type: ignore[attr-defined]  # in a loop, as every call of torch in a step asks
            if has_number(item):
                return True
    return False


def as_number(
    label: str,
    example: float,
    tensor: Tensor,
    decisions: Decisions,
    key: int | None = None,
    *,
    is_hyperparameter: bool = False,
    is_integral: bool = False,
) -> Number:
    """Return the number whose value is a tensor of one element, of any dtype."""
    value = widen(tensor.detach()).reshape(())
    return Number(label, example, value, decisions, key, is_hyperparameter=is_hyperparameter, is_integral=is_integral)
