"""What Python objects hold: attributes, items of containers, variables of closures, and globals that functions name.

`survey` lists them by path. It is bounded in depth and number, and passes over classes, modules and, if not asked for,
objects of torch and other libraries. A loss uses it once, to look for tensors that nothing trains. `jit` uses it around
a trace, because its Python runs once: what changes there is what a program would repeat. `Form` compares two values at
one path.

Some state cannot be compared, and is left: files and other objects that are written in C; generators of random numbers;
the position of `itertools.cycle` after its first round, and of `enumerate` over an iterator of such a kind; arrays of
more than 1 MiB; what hangs on a tensor of an autograd graph; globals of a module that are not reached by the names in a
function (`globals()[...]`, `sys.modules`); an attribute that is not a number and is deleted.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import functools
import gc
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import TypeIs

#: How many steps a survey goes from a root or from a module.
_LARGEST_DEPTH = 8
#: How many places it lists.
_LARGEST_COUNT = 20_000
#: The largest number of bytes of an array that are compared.
_LARGEST_ARRAY = 2**20
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WITH_CODE = (types.FunctionType, types.MethodType)
#: Packages whose functions and objects keep no state of a step, except torch's modules.
_LIBRARIES = frozenset({"torch", "funcamp", "numpy", *sys.stdlib_module_names}) - {
    *("__main__", "argparse", "collections", "types")  # Namespace, UserDict and ChainMap, SimpleNamespace
}
#: Packages whose objects change, but nothing that a step computes depends on it.
_WITHOUT_STATE = frozenset(("logging", "threading", "_thread", "typing", "enum", "weakref"))
#: What torch.fx sets on the function that takes the place of one that `torch.fx.wrap` registered, while it traces.
_PATCHED_BY_FX = "_Patcher__fx_already_patched"
#: Instructions of Python that read or write a global; the second is in the body of a class.
_OF_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: The dicts of hooks that every module has.
HOOKS = frozenset(("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"))
#: What every module has and a forward pass may change, or what may keep something.
_CHANGEABLE_OF_EVERY_MODULE = HOOKS | {"training"}


#: Stands for the value of a place that does not exist.
MISSING = object()
#: What reading a place raises if it no longer exists.
GONE = (KeyError, IndexError, AttributeError, ValueError)


class Slot(NamedTuple):
    """A place that holds a value."""

    path: str
    owner: object
    """A dict, a list or deque, a cell of a closure, or an object with the attribute; None if it cannot be set."""
    key: Any
    value: Any
    parent: str | None = None
    """The path of the object that it is in."""

    def put(self, value: object) -> None:
        """Put another value there."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, (dict, list, collections.deque)):
            self.owner[self.key] = value
        elif self.owner is not None:
            setattr(self.owner, self.key, value)

    def now(self) -> object:
        """Return the value that is there now."""
        return self.value if self.owner is None else self.reader()()

    def now_or_missing(self) -> object:
        """Return the value that is there now; `MISSING` if the place is gone."""
        try:
            return self.now()
        except GONE:
            return MISSING

    def reader(self) -> Callable[[], object]:
        """Return a fast function that returns the value that is there when it is called."""
        if isinstance(self.owner, types.CellType):
            return functools.partial(getattr, self.owner, "cell_contents")
        if isinstance(self.owner, dict):
            return functools.partial(dict.__getitem__, self.owner, self.key)
        if isinstance(self.owner, (list, collections.deque)):
            return functools.partial(operator.getitem, self.owner, self.key)
        if isinstance(self.owner, type):
            # As it was found: `getattr` makes a new bound method of a class method each time.
            return functools.partial(operator.getitem, vars(self.owner), self.key)
        return functools.partial(getattr, self.owner, self.key)


def _unsettable(path: str, value: object) -> Slot:
    """Return a place whose value cannot be replaced, such as an item of a set."""
    return Slot(path, None, None, value)


def survey(roots: Mapping[str, object], *, into_libraries: bool = False) -> dict[str, Slot]:
    """Return every slot that can be reached from named objects, by path; an outer slot comes before its contents.

    Args:
        roots: the objects, by name.
        into_libraries: whether objects of torch and other libraries are looked into, too, such as a scheduler of torch
            or a generator of random numbers. Optimizers are not: they hold parameters, which change.
    """
    slots: dict[str, Slot] = {}
    visited_ids: set[int] = set()
    queue = collections.deque((_unsettable(name, value), 0) for name, value in roots.items())
    while queue and len(slots) < _LARGEST_COUNT:
        slot, depth = queue.popleft()
        slots.setdefault(slot.path, slot)
        value = slot.value
        if isinstance(value, NUMBERS) or id(value) in visited_ids or depth >= _LARGEST_DEPTH:
            continue
        visited_ids.add(id(value))
        inner_slots = _slots_in(slot.path, value)
        if into_libraries and _is_opaque(value):
            inner_slots = _slots_of_library_object(slot.path, value)
        for inner_slot in inner_slots:
            # A model may be deep; only what hangs on its modules is bounded.
            inner_depth = 0 if isinstance(inner_slot.value, nn.Module) else depth + 1
            queue.append((inner_slot._replace(parent=slot.path), inner_depth))
    return slots


# What a value is, for comparison

#: Stands for an object that there was not before.
_NEW_OBJECT = object()


class Form:
    """What a value is, without the contents that `survey` lists by themselves: for comparison with a later value.

    Args:
        value: the value.
        known_ids: the ids of the objects that there were before; None for all. A new object of the same class is the
            same: only its contents count.
    """

    def __init__(self, value: object, known_ids: Set[int] | None = None) -> None:
        self.value = value
        self._features = _features_of(value, known_ids)

    def difference(self, path: str, now: Form) -> tuple[str, object, object] | None:
        """Return how this value differs from the one that is at its path now: a name, and what was there and is now."""
        same_count = len(self._features) == len(now._features)
        if same_count and all(map(_is_equal, self._features, now._features)):
            return None
        if isinstance(self.value, CONTAINERS) and isinstance(now.value, CONTAINERS):
            if isinstance(now.value, dict):
                return f"the keys of {path}", [*self._features[1:]], [*now._features[1:]]
            return f"len({path})", self._features[1], now._features[1]
        return path, self.value, now.value


def _features_of(value: object, known_ids: Set[int] | None) -> tuple[object, ...]:
    """Return what two values must have in common to count as the same: of a container its type, and length or keys."""
    if isinstance(value, dict):
        return (dict, *dict.keys(value))  # the order counts
    if isinstance(value, CONTAINERS):
        return type(value), len(_plain_items(value))
    if _is_opaque(value):
        content = None if isinstance(value, NUMBERS) else _bytes_of_array(value)
        return (value,) if content is None else (type(value), content)
    # A method has a function, and a function has code: one that is defined anew in each call has the same code.
    code = None
    if isinstance(value, _WITH_CODE):
        code = getattr(getattr(value, "__func__", value), "__code__", None)
    is_known = known_ids is None or id(value) in known_ids
    return type(value), code, value if is_known else _NEW_OBJECT


def _is_equal(before: object, after: object) -> bool:
    """Return whether a feature of a value is the same as before; True if it cannot be compared."""
    if before is after or after is _NEW_OBJECT:
        return True
    if type(before) is not type(after) or isinstance(before, Tensor):
        return False
    try:
        if operator.eq(before, after):
            return True
        return bool(before != before and after != after)  # both are NaN
    except Exception:  # an array of an object's own kind: it cannot be compared
        return True


def _bytes_of_array(value: Any) -> bytes | None:
    """Return the contents of an array, if it is not large."""
    try:
        view = memoryview(value)
        return view.tobytes() if view.nbytes <= _LARGEST_ARRAY else None
    except (TypeError, ValueError, NotImplementedError, BufferError):
        return None


# Kinds of values


def _is_opaque(value: Any) -> bool:
    """Return whether a value has no contents that `survey` lists."""
    if isinstance(value, (*_FUNCTIONS, Tensor, nn.Module, type, types.ModuleType, contextvars.ContextVar)):
        return False
    return not (isinstance(value, CONTAINERS) or _is_iterator(value) or _is_plain_object(value))


class _HasPythonParts(Protocol):
    """A step or a loss of this package: opaque, except for what a user gave it."""

    def python_parts(self) -> dict[str, object]: ...


def _has_python_parts(value: object) -> TypeIs[_HasPythonParts]:
    """Return whether a value is such an object. Its class is asked: the AttributeError of an object has its repr."""
    kind = type(value)
    return _package(kind.__module__) == "funcamp" and hasattr(kind, "python_parts")


def _is_iterator(value: object) -> bool:
    """Return whether a value is an iterator of Python itself, or a generator."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools", "collections")


def _is_plain_object(value: object) -> bool:
    """Return whether a value is an object of a class that is not from a library of `_LIBRARIES`."""
    if isinstance(value, (type, types.ModuleType, *_FUNCTIONS, *NUMBERS)):
        return False
    return _package(type(value).__module__) not in _LIBRARIES


def is_users(module: str | None) -> bool:
    """Return whether a module is no installed package: only there classes and globals are looked at."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    is_pythons_own = _package(module) in sys.stdlib_module_names  # `collections` too, which is not in _LIBRARIES
    return not (is_installed or is_pythons_own or _package(module) in _LIBRARIES)


def module_of(function: types.FunctionType | types.MethodType) -> str:
    """Return the name of the module of a function; "" for one of a program without a name, given to `exec`."""
    return "" if function.__module__ in (None, "builtins") else function.__module__


def _package(module: str | None) -> str:
    """Return the name of the package that a module is in."""
    return ("builtins" if module is None else module).partition(".")[0]


# Places in a value of each kind


def _slots_in(path: str, value: object) -> Iterator[Slot]:
    """Yield the places in a value: its attributes, items or variables."""
    if isinstance(value, Tensor):
        yield from _slots_of_tensor(path, value)
    elif isinstance(value, CONTAINERS):
        yield from _slots_of_container(path, value)
    elif isinstance(value, functools.partial):
        yield _unsettable(f"{path}.func", value.func)
        yield _unsettable(f"{path}.args", value.args)
        yield _unsettable(f"{path}.keywords", value.keywords)
    elif isinstance(value, types.MethodType):
        yield _unsettable(f"{path}.__self__", value.__self__)
        yield from _slots_of_function(path, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _slots_of_function(path, value)
    elif isinstance(value, type):
        yield from _slots_of_class(path, value)
    elif isinstance(value, contextvars.ContextVar):
        with contextlib.suppress(LookupError):  # it has no value
            yield _unsettable(f"{path} (a context variable)", value.get())
    elif _is_iterator(value):
        yield from _slots_of_iterator(path, value)
    elif isinstance(value, nn.Module):
        yield from _slots_of_module(path, value)
    elif _has_python_parts(value):
        for name, part in value.python_parts().items():
            yield _unsettable(f"{path}.{name}", part)
    elif _is_plain_object(value):
        yield from _slots_of_attributes(path, value)
        yield from _slots_of_class(path, type(value))


def _slots_of_tensor(path: str, tensor: Tensor) -> Iterator[Slot]:
    if type(tensor) not in (Tensor, nn.Parameter):  # subclasses have further attributes, a fake tensor for example
        return
    yield from _slots_of_attributes(path, tensor)
    if tensor._backward_hooks:
        yield _unsettable(f"{path} (hooks)", tensor._backward_hooks)


def _slots_of_container(path: str, value: object) -> Iterator[Slot]:
    if isinstance(value, dict):
        for key, item in list(dict.items(value)):  # as in _plain_items
            yield Slot(f"{path}[{key!r}]", value, key, item)
    elif isinstance(value, (list, tuple, collections.deque)):
        owner = None if isinstance(value, tuple) else value
        for index, item in enumerate(_plain_items(value)):
            yield Slot(f"{path}[{index}]", owner, index, item)
    else:  # a set: it has no key by which an item could be replaced
        for index, item in enumerate(_plain_items(value)):
            yield Slot(f"{path}{{{index}}}", None, index, item)


def _plain_items(value: object) -> list[object]:
    """Return what a container holds, by the methods of Python's own class: a subclass may compute or import in its."""
    base: Any = next(kind for kind in CONTAINERS if isinstance(value, kind))
    return list(base.__iter__(value))


def _slots_of_iterator(path: str, value: object) -> Iterator[Slot]:
    """Yield where an iterator is, and what it iterates over."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        position = () if frame is None else (frame.f_lasti, dict(frame.f_locals))
        yield _unsettable(f"{path} (a generator)", position)
        return
    items_left = -1
    with contextlib.suppress(TypeError):  # repeat without an end
        items_left = operator.length_hint(value, -1)
    # An iterator without a length, such as count(5), shows its position in its repr.
    description = repr(value) if items_left < 0 else f"{type(value).__name__} with {items_left} left"
    yield _unsettable(f"{path} (an iterator)", description)
    for index, item in enumerate(gc.get_referents(value)):
        yield _unsettable(f"{path} (an iterator)[{index}]", item)


def _slots_of_attributes(path: str, value: object) -> Iterator[Slot]:
    """Yield the attributes of an object, in its dict and in `__slots__`; of a tensor only those that a user has set."""
    is_tensor = isinstance(value, Tensor)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, item in list(attributes.items()):
            if not (is_tensor and name.startswith("_")):
                yield Slot(f"{path}.{name}", attributes, name, item)
    if is_tensor:
        return
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield Slot(f"{path}.{name}", value, name, getattr(value, name))


def _slots_of_library_object(path: str, value: object) -> Iterator[Slot]:
    """Yield the attributes of an object of a library, and what its C code keeps, as `pickle` would get it."""
    if isinstance(value, torch.Generator):
        yield _unsettable(f"{path} (its state)", value.get_state().tolist())
        return
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    if is_optimizer or callable(value) or _package(type(value).__module__) in (*_WITHOUT_STATE, "builtins"):
        return
    yield from _slots_of_attributes(path, value)
    if type(value).__reduce__ is not object.__reduce__:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):  # it cannot be pickled
                yield _unsettable(f"{path} (its state)", value.__reduce__())


def _slots_of_module(path: str, module: nn.Module) -> Iterator[Slot]:
    for key, item in list(vars(module).items()):
        if key in ("_parameters", "_buffers", "_modules"):
            for name, registered in list(item.items()):
                yield Slot(f"{path}.{name}", item, name, registered)
        elif key not in _OF_EVERY_MODULE or key in _CHANGEABLE_OF_EVERY_MODULE:
            yield Slot(f"{path}.{key}", vars(module), key, item)
    yield from _slots_of_class(path, type(module))


def _slots_of_class(path: str, kind: type) -> Iterator[Slot]:
    """Yield the variables of classes that a user wrote, and of their functions."""
    for base in kind.__mro__:
        if not is_users(base.__module__):
            continue
        for name, item in list(vars(base).items()):
            if name.startswith("__") and name != "__call__":
                continue
            if isinstance(item, (classmethod, staticmethod)):
                yield _unsettable(f"{path}.{name}", item.__func__)
            elif isinstance(item, property):
                yield _unsettable(f"{path}.{name}", item.fget)
            else:
                yield Slot(f"{path}.{name}", base, name, item)


def _slots_of_function(path: str, function: object) -> Iterator[Slot]:
    """Yield the variables of a function: closure, defaults, attributes, and the globals that it names."""
    if not isinstance(function, types.FunctionType) or _package(module_of(function)) in _LIBRARIES:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield Slot(f"{path}.{name}", cell, None, cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for index, item in enumerate(function.__defaults__ or ()):
        yield _unsettable(f"{path}.__defaults__[{index}]", item)
    for name, item in (function.__kwdefaults__ or {}).items():
        yield Slot(f"{path}.{name}", function.__kwdefaults__, name, item)
    yield from _slots_of_attributes(path, function)
    if is_users(module_of(function)):
        yield from _slots_of_globals(path, function)


def _slots_of_globals(path: str, function: types.FunctionType) -> Iterator[Slot]:
    """Yield the globals that a function reads, and in a user's modules among them the variables that it names."""
    names = frozenset(_names_in(function.__code__))
    for name in dict.fromkeys(_globals_in(function.__code__)):
        if name in function.__globals__:
            yield from _slots_of_global(f"{path}.{name}", function.__globals__, name, names)


def _slots_of_global(path: str, namespace: dict[str, Any], name: str, names: frozenset[str]) -> Iterator[Slot]:
    """Yield a global; for a user's module, the variables with these names in it."""
    item = namespace[name]
    if hasattr(item, _PATCHED_BY_FX):
        item = item.__wrapped__
    if not isinstance(item, types.ModuleType):
        yield Slot(path, namespace, name, item)
    elif is_users(item.__name__):
        for inner_name in names.intersection(vars(item)):
            yield from _slots_of_global(f"{path}.{inner_name}", vars(item), inner_name, names - {name})


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that a function, and those that it defines, read or write."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_GLOBALS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_in(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
