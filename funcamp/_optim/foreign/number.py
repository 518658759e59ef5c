"""A number that changes in training: its value is a tensor, so a program can compute it.

A `Number` is no float, so nothing in C can read its value by mistake. torch takes it where it takes a number or a
tensor (`__torch_function__`). Arithmetic gives another `Number`. A comparison is a question to the run (`calls.py`).
Everything else that Python does with a number is refused, with file and line.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from funcamp._optim.arithmetic import wide

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


class RefusedError(TypeError):
    """A class does what no pure function can."""


class Run(Protocol):
    """The run of a class's step in which a number is used."""

    asks_divisors: bool

    def ask(self, condition: Tensor, *numbers: object) -> bool:
        """Answer a question about numbers."""
        ...

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for what a class does."""
        ...


class Number:
    """A number of a class whose value is a tensor of shape (), as wide as Python's numbers."""

    __slots__ = ("run", "tensor")

    def __init__(self, tensor: Tensor, run: Run) -> None:
        self.tensor = wide(tensor.detach()).reshape(())
        self.run = run

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        raise RefusedError("a number of a step is used outside of it")

    def _read(self, *_: object) -> NoReturn:
        self.run.refuse("reads a number that changes in training")

    __float__ = __int__ = __index__ = __str__ = __repr__ = __format__ = __reduce__ = __hash__ = _read

    def __bool__(self) -> bool:
        return self.run.ask(self.tensor != 0, operator.ne, self, 0)


def value_of(item: Any) -> Any:
    """Return the tensor of a number, and anything else as it is."""
    return item.tensor if isinstance(item, Number) else item


def _operator(compute: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Number, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        divisor = operands[-1]
        # A class may catch the error: its answer is another path.
        is_asked = self.run.asks_divisors and compute in _DIVISIONS and isinstance(divisor, Number)
        if is_asked and self.run.ask(divisor.tensor != 0, divisor) is False:
            raise ZeroDivisionError
        return Number(compute(*map(value_of, operands)), self.run)

    return method


def _comparison(compute: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        if isinstance(other, (int, float, Number)):
            return self.run.ask(compute(self.tensor, value_of(other)), compute, self, other)
        if isinstance(other, numbers.Number) or hasattr(other, "__array__"):
            self.run.refuse(f"compares a number that changes in training with a {type(other).__name__}")
        return compute is operator.ne

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _operator(getattr(operator, _name), reflected=True))
for _name in ("neg", "abs", "floor", "ceil", "trunc", "round"):
    setattr(Number, f"__{_name}__", _operator(getattr(torch, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(getattr(operator, _name)))

_OF_PYTHON = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "cos", "sin", "tanh", "pow", "floor", "ceil", "copysign")
}
_this_thread = threading.local()
_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def math_of_numbers(run: Run) -> Iterator[None]:
    """Context manager: in this thread functions of `math` take a `Number`, and a tensor of one number."""
    global _users
    outer, _this_thread.run = getattr(_this_thread, "run", None), run
    with _lock:
        _users += 1
        vars(math).update(_OF_NUMBERS)
    try:
        yield
    finally:
        _this_thread.run = outer
        with _lock:
            _users -= 1
            if _users == 0:
                vars(math).update(_OF_PYTHON)


def _on_numbers(of_python: Callable[..., Any], of_torch: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(of_python)
    def function(*args: Any) -> Any:
        run = getattr(_this_thread, "run", None)
        if run is None or not any(isinstance(arg, (Number, Tensor)) for arg in args):
            return of_python(*args)
        first, *others = [wide(arg) if isinstance(arg, Tensor) else arg for arg in map(value_of, args)]
        if not isinstance(first, Tensor):
            first = torch.full_like(others[0], first)
        return Number(of_torch(first, *others), run)

    return function


_OF_NUMBERS = {name: _on_numbers(function, getattr(torch, name)) for name, function in _OF_PYTHON.items()}

_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path("torch") / "optim")
_HERE = str(Path(__file__).parent)


def location() -> str:
    """Return file and line of the class's code that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        is_torchs = file.startswith(_TORCH) and _OPTIMIZERS not in file
        if not is_torchs and not file.startswith(_HERE):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
