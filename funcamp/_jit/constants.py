"""Descriptions of a batch's constants, which are equal only if no step can distinguish the constants.

Python's `==` is not enough: 2 == 2.0, 0.0 == -0.0, and a dataclass may leave fields out of the comparison. So a
constant is described by its type and its parts, all the way down. The parts of an object are what `pickle` would write.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree

#: Types of which equal values are the same.
_COMPARED_BY_VALUE = {
    *(int, bool, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
}
#: Types of which equal numbers are the same if they are written in the same way: 0.0 and -0.0 are not, two NaNs are.
_COMPARED_AS_TEXT = {float, complex}
#: Types of constants without parts.
ATOMS = _COMPARED_BY_VALUE | _COMPARED_AS_TEXT
#: Types whose objects are identified by name: a step finds the same one under the same name.
_COMPARED_BY_IDENTITY = (type, types.FunctionType, types.ModuleType, enum.Enum)
#: Functions bound to an object compare that object by identity.
_BOUND_FUNCTIONS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
#: The largest number of parts that are compared at every call.
_MAX_PARTS = 10_000
#: The largest number of objects within each other that are compared at every call.
_MAX_DEPTH = 100
_STRINGS = {str}


class IndescribableError(TypeError):
    """A constant has a part that cannot be described."""


class Described:
    """A constant with its description, by which it is compared."""

    __slots__ = ("description", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.description = describe(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.description == other.description

    def __hash__(self) -> int:
        return hash(self.description)

    def __repr__(self) -> str:
        return repr(self.value)


class ByIdentity:
    """Compares an object by identity, and keeps it, so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: object) -> tuple[type, Hashable]:
    """Return the key of a constant: its type, and what it is compared by.

    Raises:
        IndescribableError: a part of it cannot be described.
    """
    kind = type(value)
    if kind in _COMPARED_BY_VALUE:
        return kind, value
    if kind in _COMPARED_AS_TEXT:
        return kind, repr(value)
    return kind, Described(value)


def names_key(names: Iterable[object]) -> tuple[Hashable, ...]:
    """Return the key of a dict's keys, in their order."""
    if {*map(type, names)} <= _STRINGS:
        return tuple(names)
    return tuple([_context_key(name) for name in names])


def structure_key(spec: _tree.TreeSpec) -> Hashable:
    """Return the key of a pytree's structure: the types of its nodes, and what they hold besides their children."""
    if spec.type is None:
        return None
    return spec.type, _context_key(spec.context), tuple(map(structure_key, spec.children()))


def _context_key(context: Any) -> Hashable:
    """Return the key of what a node of a pytree holds besides its children."""
    if type(context) is list and {*map(type, context)} <= _STRINGS:  # the keys of a dict
        return tuple(context)
    package, _, _ = type(context).__module__.partition(".")
    if package == "funcamp":  # compared completely, and long
        return context  # type: ignore[no-any-return]
    try:
        return describe(context)
    except IndescribableError:  # left to the comparison of the class that someone registered
        return type(context), context


def describe(value: object) -> Hashable:
    """Return a description of a constant.

    Raises:
        IndescribableError: it has a tensor, or an object that pickle cannot write, or too many parts.
    """
    return _Describer().describe(value)


class _Describer:
    """Describes one constant, part by part."""

    def __init__(self) -> None:
        self._part_count = 0
        self._outer_objects: list[object] = []
        """Those that the present part is in, the outermost first."""

    def describe(self, value: object) -> Hashable:
        """Return the description of a part: its class, and what it is compared by."""
        kind = type(value)
        if kind in _COMPARED_BY_VALUE:
            return kind, value
        if kind in _COMPARED_AS_TEXT:
            return kind, repr(value)
        if isinstance(value, _COMPARED_BY_IDENTITY):
            return kind, ByIdentity(value)
        if isinstance(value, _BOUND_FUNCTIONS):
            return kind, value
        self._part_count += 1
        for depth, outer in enumerate(self._outer_objects):
            if outer is value:
                return ByIdentity, depth  # an object that contains itself
        if isinstance(value, Tensor):
            raise IndescribableError(_tree.describe(value))
        if self._part_count > _MAX_PARTS or len(self._outer_objects) == _MAX_DEPTH:
            raise IndescribableError("too many parts")
        self._outer_objects.append(value)
        try:
            return kind, self._content(value)
        finally:
            self._outer_objects.pop()

    def _content(self, value: Any) -> Hashable:
        """Return the description of what is in an object."""
        kind = type(value)
        if kind is tuple or kind is list:
            return self._each(value)
        if isinstance(value, (set, frozenset)):  # pickle would write the members in any order
            return frozenset(self._each(value)), self._each(_attributes(value))
        if kind is dict or kind is types.MappingProxyType:
            return self._each(value), self._each(value.values())
        if kind is functools.partial:  # what pickle would write depends on whether its attributes were ever read
            return self._each([value.func, value.args, value.keywords, _attributes(value)])
        return self._pickled_content(value)

    def _pickled_content(self, value: object) -> Hashable:
        """Return the description of what pickle would write of an object."""
        kind = type(value)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise IndescribableError(_tree.brief(value)) from error
        if isinstance(reduced, str):  # a name in a module
            return ByIdentity(value)
        make, arguments, *optional = reduced
        # After these three follows only what sets the state.
        state, items, pairs = [*optional, None, None, None][:3]
        if isinstance(state, dict):
            state = _without_cached(kind, state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # with slots
            attributes, slots = state
            state = _without_cached(kind, attributes), slots
        return self._each([make, arguments, state, list(items or ()), list(pairs or ())])

    def _each(self, values: Iterable[object]) -> tuple[Hashable, ...]:
        """Return the descriptions of several parts, in their order."""
        return tuple([self.describe(value) for value in values])


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return the attributes of an object in the order of their names."""
    return sorted(getattr(value, "__dict__", {}).items())


def _without_cached(kind: type, state: dict[str, object]) -> dict[str, object]:
    """Leave out what follows from the other attributes and appears at its first use."""
    return {
        name: part
        for name, part in state.items()
        if not isinstance(getattr(kind, name, None), functools.cached_property)
    }
