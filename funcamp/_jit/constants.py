"""What constants of a batch are compared by: 1, 1.0 and True differ, and so do 0.0 and -0.0."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from funcamp import _tree

_COMPARED_BY_VALUE = {
    *(int, bool, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
}
#: Equal numbers of these types are the same if they are written in the same way.
_COMPARED_AS_TEXT = {float, complex}
ATOMS = _COMPARED_BY_VALUE | _COMPARED_AS_TEXT


class ByIdentity:
    """Compares an object by identity, and keeps it, so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def constant_key(value: Any) -> tuple[type, Hashable]:
    """Return the key of a constant: its type, and what it is compared by: its parts, or its own `==` and hash.

    Raises:
        TypeError: it cannot be hashed.
    """
    kind = type(value)
    if kind in _COMPARED_AS_TEXT:
        return kind, repr(value)
    if kind in (tuple, list):
        return kind, tuple([constant_key(part) for part in value])
    if kind is frozenset:
        return kind, frozenset([constant_key(part) for part in value])
    hash(value)
    return kind, value


def names_key(names: Iterable[object]) -> tuple[Hashable, ...]:
    """Return the key of a dict's keys, in their order."""
    return tuple([name if type(name) is str else constant_key(name) for name in names])


def structure_key(spec: _tree.TreeSpec) -> Hashable:
    """Return the key of a pytree's structure: the types of its nodes, and what they hold besides their children."""
    if spec.type is None:
        return None
    return spec.type, constant_key(spec.context), tuple(map(structure_key, spec.children()))
