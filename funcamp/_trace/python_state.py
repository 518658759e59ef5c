"""What Python objects hold: attributes, items of containers, variables of closures, and globals that functions name.

`survey` lists them by path. It is bounded in depth and number, and passes over modules of Python, classes of torch and
other libraries' functions. A loss uses it once, to look for tensors that nothing trains. `jit` uses it around a trace,
because its Python runs once: what changes there is what a program would repeat.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

_DEPTH = 8
_COUNT = 20_000
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: Packages whose functions and objects keep no state of a step, except torch's modules.
_LIBRARIES = frozenset({"torch", "funcamp", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


#: What every module has and a forward pass may change, or what may keep something: hooks.
_KEPT_OF_MODULES = frozenset(
    ("training", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
)


class Slot(NamedTuple):
    """A place that holds a value."""

    path: str
    owner: Any
    """A dict, a list or deque, a cell of a closure, or an object with the attribute; None if it cannot be set."""
    key: Any
    value: Any
    parent: str | None = None
    """The path of the object that it is in."""

    def put(self, value: Any) -> None:
        """Put another value there."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, (dict, list, collections.deque)):
            self.owner[self.key] = value
        elif self.owner is not None:
            setattr(self.owner, self.key, value)

    def now(self) -> Any:
        """Return the value that is there now."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, (dict, list, collections.deque)):
            return self.owner[self.key]
        return self.value if self.owner is None else getattr(self.owner, self.key)


def survey(roots: Mapping[str, Any]) -> dict[str, Slot]:
    """Return every slot that can be reached from named objects, by path; an outer slot comes before its contents."""
    found: dict[str, Slot] = {}
    seen: set[int] = set()
    left = collections.deque((Slot(name, None, None, value), 0) for name, value in roots.items())
    while left and len(found) < _COUNT:
        slot, depth = left.popleft()
        found.setdefault(slot.path, slot)
        value = slot.value
        if isinstance(value, NUMBERS) or id(value) in seen or depth >= _DEPTH:
            continue
        seen.add(id(value))
        # A model may be deep; only what hangs on its modules is bounded.
        for inner in _inside(slot.path, value):
            inner_depth = 0 if isinstance(inner.value, nn.Module) else depth + 1
            left.append((inner._replace(parent=slot.path), inner_depth))
    return found


def _inside(path: str, value: Any) -> Iterator[Slot]:
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter):  # others have attributes of their own, such as a fake tensor's
            yield from _attributes(path, value)
    elif isinstance(value, CONTAINERS):
        yield from _items(path, value)
    elif isinstance(value, functools.partial):
        yield Slot(f"{path}.func", None, None, value.func)
        yield Slot(f"{path}.args", None, None, value.args)
        yield Slot(f"{path}.keywords", None, None, value.keywords)
    elif isinstance(value, types.MethodType):
        yield Slot(f"{path}.__self__", None, None, value.__self__)
        yield from _of_function(path, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, itertools.count):
        yield Slot(f"{path} (a count)", None, None, repr(value))
    elif isinstance(value, nn.Module):
        yield from _of_module(path, value)
    elif _is_plain_object(value):
        yield from _attributes(path, value)
        yield from _of_class(path, type(value))


def _attributes(path: str, value: Any) -> Iterator[Slot]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for key, item in list(attributes.items()):
            if not (isinstance(value, Tensor) and key.startswith("_")):
                yield Slot(f"{path}.{key}", attributes, key, item)
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for key in (names,) if isinstance(names, str) else names:
            if not isinstance(value, Tensor) and hasattr(value, key):
                yield Slot(f"{path}.{key}", value, key, getattr(value, key))


def _of_module(path: str, module: nn.Module) -> Iterator[Slot]:
    for key, item in list(vars(module).items()):
        if key in ("_parameters", "_buffers", "_modules"):
            for name, inner in list(item.items()):
                yield Slot(f"{path}.{name}", item, name, inner)
        elif key not in _OF_EVERY_MODULE or key in _KEPT_OF_MODULES:
            yield Slot(f"{path}.{key}", vars(module), key, item)
    yield from _of_class(path, type(module))


def _of_class(path: str, kind: type) -> Iterator[Slot]:
    """Yield the variables of classes that a user wrote, and of their functions."""
    for each in kind.__mro__:
        if not _is_users(each.__module__):
            continue
        for key, item in list(vars(each).items()):
            if key.startswith("__") and key != "__call__":
                continue
            if isinstance(item, (types.FunctionType, *CONTAINERS, *NUMBERS, Tensor)):
                yield Slot(f"{path}.{key}", each, key, item)


def _items(path: str, value: Any) -> Iterator[Slot]:
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield Slot(f"{path}[{key!r}]", value, key, item)
    elif isinstance(value, (list, tuple, collections.deque)):
        owner = None if isinstance(value, tuple) else value
        for index, item in enumerate(list(value)):
            yield Slot(f"{path}[{index}]", owner, index, item)
    else:
        for index, item in enumerate(list(value)):
            yield Slot(f"{path}{{{index}}}", None, index, item)


def _of_function(path: str, function: Any) -> Iterator[Slot]:
    if not isinstance(function, types.FunctionType) or _package(function.__module__) in _LIBRARIES:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield Slot(f"{path}.{name}", cell, None, cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for index, item in enumerate(function.__defaults__ or ()):
        yield Slot(f"{path}.__defaults__[{index}]", None, None, item)
    for key, item in (function.__kwdefaults__ or {}).items():
        yield Slot(f"{path}.{key}", function.__kwdefaults__, key, item)
    yield from _attributes(path, function)
    if not _is_users(function.__module__):
        return
    for name in function.__code__.co_names:
        item = function.__globals__.get(name, function)
        is_value = isinstance(item, (*NUMBERS, *CONTAINERS, *_FUNCTIONS, Tensor, nn.Module))
        is_value = is_value or (isinstance(item, type) and _is_users(item.__module__))
        if item is not function and (is_value or _is_plain_object(item)):
            yield Slot(f"{path}.{name}", function.__globals__, name, item)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, *_FUNCTIONS, *NUMBERS)):
        return False
    return isinstance(value, _NAMESPACES) or _package(type(value).__module__) not in _LIBRARIES


def _is_users(module: str | None) -> bool:
    """Return whether a module is no installed package: only there classes and globals are looked at."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return not installed and _package(module) not in _LIBRARIES


def _package(name: str | None) -> str:
    return (name or "builtins").partition(".")[0]
