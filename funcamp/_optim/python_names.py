"""The names of Python by which a class's code computes with numbers, such as `math.sqrt`: made to take a `Number`, too.

`math.sqrt(x)` reads a float in C, without a call of a method of `Number`. So while a step runs, the modules of its
class find other functions under these names. They do what Python's do for everything else, so other threads may call
them.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import math
import operator
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.compiled_parts import uncompiled
from funcamp._optim.decisions import Decisions
from funcamp._optim.number import Compute, Number, as_number, computed
from funcamp._scaler.precision import widen

#: The names of a module and their values.
Namespace: TypeAlias = dict[str, Any]

#: Functions of torch for those of `math` with other names.
_OTHER_NAMES = {"fabs": torch.abs, "fmod": torch.fmod}
#: Those of torch with another meaning, or another form of arguments.
_OTHER_MEANINGS = {"gamma", "dist", "ldexp", "prod", "remainder", "isclose", "frexp", "modf", "gcd", "lcm", "sumprod"}


def _on_numbers(python: Compute, of_torch: Compute) -> Compute:
    """Return a function of Python that takes numbers whose values are tensors, and gives such a number for them."""

    @functools.wraps(python)
    def function(*args: object) -> object:
        numbers = _as_numbers(args)
        return python(*args) if numbers is None else computed(of_torch, *numbers)

    return function


class _ThisThread(threading.local):
    decisions: Decisions | None = None
    """Those of the step that this thread runs."""


_this_thread = _ThisThread()


def _as_numbers(values: Iterable[object]) -> list[Any] | None:
    """Return values of which one is a `Number` or a tensor that Python would read, as numbers; None for others."""
    numbers: list[object] = []
    has_number = False
    for value in values:
        number = value
        if isinstance(value, Tensor) and value.numel() == 1 and _this_thread.decisions is not None:
            number = as_number(
                "a tensor's value", _this_thread.decisions.unknown_example, value, _this_thread.decisions
            )
        has_number = has_number or isinstance(number, Number)
        numbers.append(number)
    return numbers if has_number else None


def _predicate(of_torch: Compute) -> Compute:
    """Return a function whose truth is a number."""
    return lambda *args: widen(of_torch(*args))


def _log(value: Tensor, base: Tensor | float | None = None) -> Tensor:
    """Return the logarithm to a base, of tensors."""
    if base is None:
        return torch.log(value)
    return torch.log(value) / (torch.log(base) if isinstance(base, Tensor) else math.log(base))


def _is_close(value: float, other: float, *, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> object:
    """Return what `math.isclose` does, of numbers."""
    if _as_numbers((value, other, rel_tol, abs_tol)) is None:
        return math.isclose(value, other, rel_tol=rel_tol, abs_tol=abs_tol)
    larger = _MAX(_MATH.fabs(value), _MATH.fabs(other))
    return _MATH.fabs(value - other) <= _MAX(rel_tol * larger, abs_tol)


def _sum_of_numbers(values: Iterable[Any]) -> Any:
    """Return what `math.fsum` does, of numbers."""
    values = list(values)
    numbers = _as_numbers(values)
    return math.fsum(values) if numbers is None else functools.reduce(operator.add, numbers)


def _extreme(python: Compute, is_before: Callable[[Tensor, Tensor], Tensor]) -> Compute:
    """Return `min` or `max`, which ask no question if the operands are numbers.

    As in Python the other operand is taken if it comes before the first; NaN comes before nothing.
    """

    def of_two(value: Tensor | float, other: Tensor | float) -> Tensor:
        first, second = [item if isinstance(item, Tensor) else _constant(item) for item in (value, other)]
        return torch.where(is_before(second, first), second, first)

    of_two.__name__ = python.__name__

    def of_pair(value: Any, other: Any) -> Any:
        tensors = [item for item in (value, other) if isinstance(item, Tensor)]
        if tensors and _as_numbers((value, other)) is not None:
            operands = [item.tensor if isinstance(item, Number) else item for item in (value, other)]
            result = of_two(*operands)
            # The result has the dtype of a floating-point tensor. A tensor of whole numbers does not decide it, because
            # the result may be the other operand, a fraction.
            return result.to(tensors[0].dtype) if tensors[0].is_floating_point() else result
        if isinstance(value, Number) or isinstance(other, Number):
            return computed(of_two, value, other)
        return python(value, other)

    @functools.wraps(python)
    def function(*args: Any, **options: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if not options and _as_numbers(values) is not None:
            return functools.reduce(of_pair, values)
        return python(values, **options) if len(args) == 1 else python(*args, **options)

    return function


def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


class _TypeOfNumbers(type):
    """The class of what stands for `float` or `int`: the same, except that calling it on a `Number` reads nothing."""

    python: type
    converted: Callable[[Tensor], Tensor]

    def __call__(cls, *args: Any) -> Any:
        numbers = _as_numbers(args) if len(args) == 1 else None
        return cls.python(*args) if numbers is None else computed(cls.converted, *numbers)

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, Number):
            return cls.python is (int if instance.is_integral and not instance.is_hyperparameter else float)
        return isinstance(instance, cls.python)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.python

    def __hash__(cls) -> int:
        return hash(cls.python)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.python)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.python, name)


def _type_of_numbers(python: type, converted: Callable[[Tensor], Tensor]) -> type:
    return _TypeOfNumbers(python.__name__, (), {"python": python, "converted": staticmethod(converted)})


class _TypeOfTypes(type):
    """The class of what stands for `type`: the same, except that the type of a number is what stands for its type."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) != 1 or options:
            return type(*args, **options)
        kind = type(args[0])
        if isinstance(args[0], Number):
            return _FLOAT if isinstance(args[0], _FLOAT) else _INT
        if kind.__module__.startswith("torch._subclasses."):
            return Tensor  # it stands for one in a trace
        return {float: _FLOAT, int: _INT}.get(kind, kind)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


def _same(value: Tensor) -> Tensor:
    return value.clone()


def _math() -> types.ModuleType:
    """Return a module like `math`."""
    module = types.ModuleType("math", math.__doc__)
    vars(module).update(vars(math))
    for name, python in vars(math).items():
        of_torch: Any = _OTHER_NAMES.get(name, getattr(torch, name, None))
        if callable(python) and of_torch is not None and name not in _OTHER_MEANINGS:
            setattr(module, name, _on_numbers(python, _predicate(of_torch) if name.startswith("is") else of_torch))
    module.fsum = _sum_of_numbers  # type: ignore[attr-defined]
    module.log = _on_numbers(math.log, _log)  # type: ignore[attr-defined]
    module.isclose = _is_close  # type: ignore[attr-defined]
    return module


def _time() -> types.ModuleType:
    """Return a module like `time` whose clocks a step cannot read."""
    module = types.ModuleType("time", time.__doc__)
    vars(module).update(vars(time))
    for name in _CLOCKS:
        setattr(module, name, _refusing(getattr(time, name)))
    return module


def _refusing(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that a step cannot read."""

    @functools.wraps(clock)
    def read() -> float:
        if _this_thread.decisions is not None:
            _this_thread.decisions.refuse_class(
                f"it reads time.{clock.__name__}, which a compiled program would repeat; pass what depends on the time "
                "as a hyperparameter, a tensor that you fill_ between steps"
            )
        return clock()

    return read


#: The clocks of `time`.
_CLOCKS = tuple(
    [f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")]
)
_TIME = _time()
_MATH = _math()
#: What takes the place of an object of Python, by its id.
_INSTEAD: dict[int, object] = {id(math): _MATH, id(time): _TIME}
_INSTEAD |= {id(function): getattr(_MATH, name) for name, function in vars(math).items() if callable(function)}
_INSTEAD |= {id(getattr(time, name)): getattr(_TIME, name) for name in _CLOCKS}
_MIN = _extreme(builtins.min, torch.lt)
_MAX = _extreme(builtins.max, torch.gt)
_FLOAT = _type_of_numbers(float, _same)
_INT = _type_of_numbers(int, torch.trunc)
#: Names that are found in Python's own namespace, unless a module has them.
_BUILTINS: Namespace = {
    "min": _MIN,
    "max": _MAX,
    "float": _FLOAT,
    "int": _INT,
    "type": _TypeOfTypes("type", (), {}),
}


class _Names:
    """The names of one module that are replaced while steps run."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._count = len(namespace)
        self._former = {name: value for name, value in namespace.items() if id(value) in _INSTEAD}
        self._instead = {name: _INSTEAD[id(value)] for name, value in self._former.items()}
        self._instead |= {name: value for name, value in _BUILTINS.items() if name not in namespace}
        for name, value in list(namespace.items()):
            function = uncompiled(value)
            if function is not None:
                self._former[name] = value
                self._instead[name] = function
        self.use_count = 0

    def are_current(self) -> bool:
        """Return whether the module is as it was: no code has reloaded it or given it other names."""
        names = self._namespace
        return len(names) == self._count and all(names.get(name) is value for name, value in self._former.items())

    def replace(self) -> None:
        """Replace them."""
        self._namespace.update(self._instead)

    def put_back(self) -> None:
        """Put back what was there."""
        for name in self._instead:
            if name in self._former:
                self._namespace[name] = self._former[name]
            else:
                del self._namespace[name]


_lock = threading.Lock()
#: By the id of a namespace, which `_namespaces_of` keeps alive.
_names: dict[int, _Names] = {}


@contextlib.contextmanager
def names_for_numbers(cls: type, decisions: Decisions | None) -> Iterator[None]:
    """Context manager: the modules of an optimizer's class find functions that take a `Number`.

    Args:
        cls: the class.
        decisions: those of the run; None around several.
    """
    outer_decisions = _this_thread.decisions
    _this_thread.decisions = decisions
    namespaces = _namespaces_of(cls)
    with _lock:
        for namespace in namespaces:
            names = _names.get(id(namespace))
            if names is None or not (names.use_count or names.are_current()):
                names = _names[id(namespace)] = _Names(namespace)
            if not names.use_count:
                names.replace()
            names.use_count += 1
    try:
        yield
    finally:
        _this_thread.decisions = outer_decisions
        with _lock:
            for namespace in namespaces:
                names = _names[id(namespace)]
                names.use_count -= 1
                if not names.use_count:
                    names.put_back()


@functools.cache
def _namespaces_of(cls: type) -> tuple[Namespace, ...]:
    """Return the global names of a class's code: of its methods, of what they name in its package, and so on."""
    namespaces: dict[int, Namespace] = {}
    bases = [base for base in cls.__mro__ if base is not object]
    waiting: list[object] = list(bases)
    # A class that `exec` defines may say that it is from "builtins".
    packages = {_package(base.__module__) for base in bases} - {"builtins", *sys.stdlib_module_names}
    while waiting:
        for namespace in _namespaces_in(waiting.pop()):
            if id(namespace) not in namespaces:
                namespaces[id(namespace)] = namespace
                named = list(namespace.values())
                waiting += [value for value in named if _package(_module_of(value)) in packages]
    return tuple(namespaces.values())


def _namespaces_in(value: object) -> Iterator[Namespace]:
    """Yield the global names of a module, a function, or of a class and its methods."""
    if isinstance(value, types.ModuleType):
        yield vars(value)
        return
    if isinstance(value, type):
        if value.__module__ in sys.modules and value.__module__ not in ("builtins", *sys.stdlib_module_names):
            yield vars(sys.modules[value.__module__])
        functions = [getattr(member, "__func__", member) for member in vars(value).values()]
    else:
        functions = [value]
    for function in functions:
        if isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
            code = inspect.unwrap(function)
            if isinstance(code, types.FunctionType):
                yield code.__globals__


def _module_of(value: object) -> str:
    """Return the name of the module that a value is, or is from; "" for others."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _package(module: str) -> str:
    """Return the package whose modules may have the code of a class: of torch only `torch.optim`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "torch" else parts[0]
