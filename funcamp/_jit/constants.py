"""Descriptions of a batch's constants, which are equal only if no step can distinguish the constants.

Python's `==` is not enough: 2 == 2.0, 0.0 == -0.0, and a dataclass may leave fields out of the comparison. So a
constant is described by its type and its parts, all the way down. The parts of an object are what `pickle` would write.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree

#: Types of which equal values are the same.
_PLAIN = {
    *(int, bool, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
}
#: Types of which equal numbers are the same if they are written in the same way: 0.0 and -0.0 are not, two NaNs are.
_WRITTEN = {float, complex}
#: Types of constants without parts.
ATOMS = _PLAIN | _WRITTEN
#: Types whose objects are what they are called: a step finds the same one under the same name.
_BY_IDENTITY = (type, types.FunctionType, types.ModuleType, enum.Enum)
#: Functions bound to an object compare that object by identity.
_BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
#: The largest number of parts, and of objects within each other, that are compared at every call.
_MOST_PARTS, _DEEPEST = 10_000, 100
_STRINGS = {str}


class IndescribableError(TypeError):
    """A constant has a part that cannot be described."""


class Described:
    """A constant with its description, by which it is compared."""

    __slots__ = ("description", "value")

    def __init__(self, value: object) -> None:
        self.value, self.description = value, describe(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.description == other.description

    def __hash__(self) -> int:
        return hash(self.description)

    def __repr__(self) -> str:
        return repr(self.value)


class _Same:
    """Compares an object by identity, and keeps it, so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: object) -> tuple[type, Hashable]:
    """Return the key of a constant: its type, and what it is compared by.

    Raises:
        IndescribableError: a part of it cannot be described.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _WRITTEN:
        return kind, repr(value)
    return kind, Described(value)


def names_key(names: Mapping[Any, Any]) -> tuple[Hashable, ...]:
    """Return the key of a dict's keys, in their order."""
    if {*map(type, names)} <= _STRINGS:
        return tuple(names)
    return tuple([_context_key(name) for name in names])


def structure_key(spec: Any) -> Hashable:
    """Return the key of a pytree's structure: the types of its nodes, and what they hold besides their children."""
    if spec.type is None:
        return None
    return spec.type, _context_key(spec.context), tuple(map(structure_key, spec.children()))


def _context_key(context: Any) -> Hashable:
    if type(context) is list and {*map(type, context)} <= _STRINGS:  # the keys of a dict
        return tuple(context)
    if type(context).__module__.partition(".")[0] == "funcamp":  # compared completely, and long
        return context  # type: ignore[no-any-return]
    try:
        return describe(context)
    except IndescribableError:  # left to the comparison of the class that someone registered
        return type(context), context


def describe(value: object) -> Hashable:
    """Return a description of a constant.

    Raises:
        IndescribableError: it has a tensor, or an object that pickle cannot take apart, or too many parts.
    """
    return _Describer().describe(value)


class _Describer:
    def __init__(self) -> None:
        self._parts = 0
        self._around: list[object] = []

    def describe(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in _WRITTEN:
            return kind, repr(value)
        if isinstance(value, _BY_IDENTITY):
            return kind, _Same(value)
        if isinstance(value, _BOUND):
            return kind, value
        self._parts += 1
        for depth, outer in enumerate(self._around):
            if outer is value:
                return _Same, depth  # an object that contains itself
        if isinstance(value, Tensor) or self._parts > _MOST_PARTS or len(self._around) == _DEEPEST:
            raise IndescribableError(_tree.describe(value) if isinstance(value, Tensor) else "too many parts")
        self._around.append(value)
        try:
            return kind, self._content(value)
        finally:
            self._around.pop()

    def _content(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is tuple or kind is list:
            return self._each(value)
        if isinstance(value, (set, frozenset)):  # pickle would write the members in any order
            return frozenset(self._each(value)), self._each(_attributes(value))
        if kind is dict:
            return self._each(value), self._each(value.values())
        if kind is types.MappingProxyType:
            return self._each(value), self._each(value.values())
        if kind is functools.partial:  # what pickle would write depends on whether its attributes were ever read
            return self._each([value.func, value.args, value.keywords, _attributes(value)])
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise IndescribableError(_tree.brief(value)) from error
        if isinstance(reduced, str):  # a name in a module
            return _Same(value)
        make, arguments, *rest = reduced
        state, items, pairs = [*rest, None, None, None][:3]
        if isinstance(state, dict):
            state = _without_cached(kind, state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # with slots
            state = _without_cached(kind, state[0]), state[1]
        return self._each([make, arguments, state, list(items or ()), list(pairs or ())])

    def _each(self, values: Any) -> tuple[Hashable, ...]:
        return tuple([self.describe(value) for value in values])


def _attributes(value: object) -> list[tuple[str, Any]]:
    return sorted(getattr(value, "__dict__", {}).items())


def _without_cached(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what follows from the rest and appears at its first use."""
    return {
        name: part
        for name, part in state.items()
        if not isinstance(getattr(kind, name, None), functools.cached_property)
    }
