"""What Python objects hold: attributes, items of containers, variables of closures, and globals that functions name.

`survey` lists them by path. It is bounded in depth and number, and passes over classes, modules and objects of torch
and other libraries. A loss uses it once, to look for tensors that nothing trains. `jit` uses it around a trace, because
its Python runs once: what changes there is what a program would repeat. `Form` compares two values at one path.

Some state cannot be compared, and is left: files and other objects that are written in C; generators of random numbers;
the position of `itertools.cycle` after its first round, and of `enumerate` over an iterator of such a kind; arrays of
more than 1 MiB; what hangs on a tensor of an autograd graph; globals of a module that are not reached by the names in a
function (`globals()[...]`, `sys.modules`); an attribute that is not a number and is deleted.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

_DEPTH = 8
_COUNT = 20_000
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: Packages whose functions and objects keep no state of a step, except torch's modules.
_LIBRARIES = frozenset({"torch", "funcamp", "numpy", *sys.stdlib_module_names}) - {
    *("__main__", "argparse", "collections", "types")  # Namespace, UserDict and ChainMap, SimpleNamespace
}
#: What torch.fx sets on the function that takes the place of one that `torch.fx.wrap` registered, while it traces.
_PATCHED_BY_FX = "_Patcher__fx_already_patched"
#: The largest number of bytes of an array that are compared.
_BYTES = 2**20
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
        return self.value if self.owner is None else self.reader()()

    def reader(self) -> Callable[[], Any]:
        """Return a fast function that returns the value that is there when it is called."""
        if isinstance(self.owner, types.CellType):
            return functools.partial(getattr, self.owner, "cell_contents")
        if isinstance(self.owner, dict):
            return functools.partial(dict.__getitem__, self.owner, self.key)
        if isinstance(self.owner, (list, collections.deque)):
            return functools.partial(operator.getitem, self.owner, self.key)
        return functools.partial(getattr, self.owner, self.key)


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


class Form:
    """What a value is, without the contents that `survey` lists by themselves: for comparison with a later value.

    Args:
        value: the value.
        known: the ids of the objects that there were before; None for all. A new object of the same class is the same:
            only its contents count.
    """

    def __init__(self, value: Any, known: Set[int] | None = None) -> None:
        self.value = value
        self.parts: tuple[Any, ...]
        if isinstance(value, dict):
            self.parts = (dict, *dict.keys(value))  # the order counts
        elif isinstance(value, CONTAINERS):
            self.parts = type(value), len(_plain_items(value))
        elif _is_opaque(value):
            content = None if isinstance(value, NUMBERS) else _bytes(value)
            self.parts = (value,) if content is None else (type(value), content)
        else:
            code = getattr(getattr(value, "__func__", value), "__code__", None) if isinstance(value, _CODE) else None
            self.parts = type(value), code, value if known is None or id(value) in known else _NEW

    def changed(self, path: str, now: Form) -> tuple[str, Any, Any] | None:
        """Return how this value differs from the one that is at its path now: a name, and what was there and is now."""
        if len(self.parts) == len(now.parts) and all(map(_is_equal, self.parts, now.parts)):
            return None
        if isinstance(self.value, CONTAINERS) and isinstance(now.value, CONTAINERS):
            if isinstance(now.value, dict):
                return f"the keys of {path}", [*self.parts[1:]], [*now.parts[1:]]
            return f"len({path})", self.parts[1], now.parts[1]
        return path, self.value, now.value


_NEW = object()
_CODE = (types.FunctionType, types.MethodType)


def _is_equal(before: Any, after: Any) -> bool:
    if before is after or after is _NEW:
        return True
    if type(before) is not type(after) or isinstance(before, Tensor):
        return False
    try:
        return bool(operator.eq(before, after) or (before != before and after != after))
    except Exception:  # an array of an object's own kind: it cannot be compared
        return True


def _bytes(value: Any) -> bytes | None:
    """Return the contents of an array, if it is not large."""
    try:
        view = memoryview(value)
        return view.tobytes() if view.nbytes <= _BYTES else None
    except (TypeError, ValueError, NotImplementedError, BufferError):
        return None


def _is_opaque(value: Any) -> bool:
    """Return whether a value has no contents that `survey` lists."""
    if isinstance(value, (*_FUNCTIONS, Tensor, nn.Module, type, types.ModuleType, contextvars.ContextVar)):
        return False
    return not (isinstance(value, CONTAINERS) or _is_iterator(value) or _is_plain_object(value))


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python itself, or a generator."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools", "collections")


def _inside(path: str, value: Any) -> Iterator[Slot]:
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter):  # others have attributes of their own, such as a fake tensor's
            yield from _attributes(path, value)
            if value._backward_hooks:
                yield Slot(f"{path} (hooks)", None, None, value._backward_hooks)
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
    elif isinstance(value, type):
        yield from _of_class(path, value)
    elif isinstance(value, contextvars.ContextVar):
        with contextlib.suppress(LookupError):  # it has no value
            yield Slot(f"{path} (a context variable)", None, None, value.get())
    elif _is_iterator(value):
        yield from _of_iterator(path, value)
    elif isinstance(value, nn.Module):
        yield from _of_module(path, value)
    elif _is_plain_object(value):
        yield from _attributes(path, value)
        yield from _of_class(path, type(value))


def _of_iterator(path: str, value: Any) -> Iterator[Slot]:
    """Yield where an iterator is, and what it iterates over."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        place = () if frame is None else (frame.f_lasti, dict(frame.f_locals))
        yield Slot(f"{path} (a generator)", None, None, place)
        return
    left = -1
    with contextlib.suppress(TypeError):  # repeat without an end
        left = operator.length_hint(value, -1)
    shown = repr(value) if left < 0 else f"{type(value).__name__} with {left} left"
    yield Slot(f"{path} (an iterator)", None, None, shown)
    for index, item in enumerate(gc.get_referents(value)):
        yield Slot(f"{path} (an iterator)[{index}]", None, None, item)


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
            function = getattr(item, "__func__", None) if isinstance(item, (classmethod, staticmethod)) else None
            yield (
                Slot(f"{path}.{key}", each, key, item)
                if function is None
                else Slot(f"{path}.{key}", None, None, function)
            )


def _items(path: str, value: Any) -> Iterator[Slot]:
    if isinstance(value, dict):
        for key, item in list(dict.items(value)):
            yield Slot(f"{path}[{key!r}]", value, key, item)
    elif isinstance(value, (list, tuple, collections.deque)):
        owner = None if isinstance(value, tuple) else value
        for index, item in enumerate(_plain_items(value)):
            yield Slot(f"{path}[{index}]", owner, index, item)
    else:
        for index, item in enumerate(_plain_items(value)):
            yield Slot(f"{path}{{{index}}}", None, index, item)


def _plain_items(value: Any) -> list[Any]:
    """Return what a container holds, by the methods of Python's own class: a subclass may compute or import in its."""
    base: Any = next(kind for kind in CONTAINERS if isinstance(value, kind))
    return list(base.__iter__(value))


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
    if _is_users(function.__module__):
        yield from _named(path, function.__globals__, frozenset(_names(function.__code__)))


def _named(path: str, namespace: dict[str, Any], names: frozenset[str]) -> Iterator[Slot]:
    """Yield the variables with these names in a namespace, and in a user's modules that they name there."""
    for name in names & namespace.keys():
        item = namespace[name]
        if hasattr(item, _PATCHED_BY_FX):
            item = item.__wrapped__
        if not isinstance(item, types.ModuleType):
            yield Slot(f"{path}.{name}", namespace, name, item)
        elif _is_users(item.__name__):
            yield from _named(f"{path}.{name}", vars(item), names - {name})


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in those that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, *_FUNCTIONS, *NUMBERS)):
        return False
    return _package(type(value).__module__) not in _LIBRARIES


def _is_users(module: str | None) -> bool:
    """Return whether a module is no installed package: only there classes and globals are looked at."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return not installed and _package(module) not in _LIBRARIES


def _package(name: str | None) -> str:
    return (name or "builtins").partition(".")[0]
