"""A number that changes in training: its value is a tensor, so a program can compute it.

A `ChangingNumber` is no float, so nothing in C can read its value by mistake. torch takes it where it takes a number or
a tensor (`__torch_function__`). Arithmetic gives another one. A comparison is a question to the run (`calls.py`).
Everything else that Python does with a number is refused: the traceback has the line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcamp._scaler.state import widen
from funcamp._trace.as_compiled import as_eager

#: How many questions a run may ask besides those whose answers it gets, and how many runs there may be.
MOST_WAYS = 16
#: A remedy: parameters step one by one, because each asks its own questions.
SEPARATELY = "one by one"
#: A remedy: whether a step is the first is a question, because then the class computes by another formula.
FIRST = "another first step"
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


class RefusedError(TypeError):
    """A class does what no pure function can, or not without a remedy: how it may be run instead."""

    def __init__(self, cls: type, why: str, remedy: str | None = None) -> None:
        super().__init__(f"stateless: {cls.__name__} cannot be made pure: {why}")
        self.remedy = remedy


def too_many_ways(cls: type) -> RefusedError:
    """Return the error for a class whose step asks too much."""
    why = f"its step branches on numbers that change in training in more than {MOST_WAYS} ways"
    return RefusedError(cls, why, SEPARATELY)


class Run:
    """The questions that a class asks in one run of its step.

    Args:
        cls: the class.
        answers: the answers to the first questions of this run.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], answers: tuple[bool, ...]) -> None:
        #: Whether a division by 0 is a question, because the step catches it. No run shows it, but the code.
        self.asks_divisors = "ZeroDivisionError" in inspect.unwrap(cls.step).__code__.co_names
        self.conditions: list[Tensor] = []
        self.path: list[bool] = []
        """The answers that this run got."""
        self.refusal: RefusedError | None = None
        """The first refusal, which the class may have caught."""
        self._cls = cls
        self._answers = answers
        self._known: dict[tuple[object, ...], bool] = {}

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for what a class does."""
        error = RefusedError(self._cls, f"its step {what}")
        self.refusal = self.refusal or error
        raise error

    def ask(self, condition: Tensor, *question: object) -> bool:
        """Return the answer to a question; the same one to the same question about the same numbers."""
        key = tuple(map(value_of, question)) or (condition,)
        if key in self._known:
            return self._known[key]
        if len(self.path) >= len(self._answers) + MOST_WAYS:  # also a loop that ends when an answer is no
            self.refusal = too_many_ways(self._cls)
            raise self.refusal
        answer = self._answers[len(self.path)] if len(self.path) < len(self._answers) else True
        self.conditions.append(condition.reshape(()))
        self.path.append(answer)
        self._known[key] = answer
        return answer


class ChangingNumber:
    """A number of a class whose value is a tensor of shape (), as wide as Python's numbers."""

    __slots__ = ("run", "tensor")

    def __init__(self, tensor: Tensor, run: Run) -> None:
        self.tensor = widen(tensor.detach()).reshape(())
        self.run = run

    __torch_function__ = None  # so that torch asks the mode of the run, `Calls`

    def _read(self, *_: object) -> NoReturn:
        self.run.refuse("reads a number that changes in training")

    __float__ = __int__ = __index__ = __str__ = __repr__ = __format__ = __reduce__ = __hash__ = _read

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))


def value_of(item: Any) -> Any:
    """Return the tensor of a number, and anything else as it is."""
    return item.tensor if isinstance(item, ChangingNumber) else item


def _operator(compute: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: ChangingNumber, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        divisor = operands[-1]
        # A class may catch the error: its answer is another path.
        is_asked = self.run.asks_divisors and compute in _DIVISIONS and isinstance(divisor, ChangingNumber)
        if is_asked and self.run.ask(divisor.tensor != 0, divisor) is False:
            raise ZeroDivisionError
        return ChangingNumber(compute(*map(value_of, operands)), self.run)

    return method


def _comparison(compute: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: ChangingNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        if not isinstance(other, (int, float, ChangingNumber)):
            self.run.refuse(f"compares a number that changes in training with a {type(other).__name__}")
        return self.run.ask(compute(self.tensor, value_of(other)), compute, self, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(ChangingNumber, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(ChangingNumber, f"__r{_name}__", _operator(getattr(operator, _name), reflected=True))
for _name in ("neg", "abs", "floor", "ceil", "trunc", "round"):
    setattr(ChangingNumber, f"__{_name}__", _operator(getattr(torch, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ChangingNumber, f"__{_name}__", _comparison(getattr(operator, _name)))

_MATH_OF_PYTHON = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "cos", "sin", "tanh", "pow", "floor", "ceil", "copysign")
}
#: One thread runs a step at a time, because both are set for all threads.
_lock = threading.RLock()


@contextlib.contextmanager
def in_a_step() -> Iterator[None]:
    """Context manager: functions of `math` take a `ChangingNumber`, and a class runs as without a compiler.

    With other arguments the functions of `math` do what they did.
    """
    with _lock, torch.compiler.set_stance("force_eager"), as_eager():
        functions = {name: vars(math)[name] for name in _MATH}
        vars(math).update(_MATH)
        try:
            yield
        finally:
            vars(math).update(functions)


def _on_numbers(of_python: Callable[..., Any], of_torch: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(of_python)
    def function(*args: Any) -> Any:
        # In a run the item of a tensor is a `ChangingNumber`.
        items = [arg.item() if isinstance(arg, Tensor) else arg for arg in args]
        number = next((item for item in items if isinstance(item, ChangingNumber)), None)
        if number is None:
            return of_python(*args)
        first, *others = map(value_of, items)
        if not isinstance(first, Tensor):
            first = torch.full_like(number.tensor, first)
        return ChangingNumber(of_torch(first, *others), number.run)

    return function


_MATH = {name: _on_numbers(function, getattr(torch, name)) for name, function in _MATH_OF_PYTHON.items()}
