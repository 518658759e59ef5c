"""What a compiled step is made for: shapes, dtypes and devices; and how one batch differs from another in that."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree


def flat(batch: Tree) -> tuple[list[Any], Any]:
    """The leaves of a batch, and what stands for its structure: cheap for a tuple or a dict of tensors."""
    kind = type(batch)
    if kind is tuple and {*map(type, batch)} == {Tensor}:
        return list(batch), len(batch)
    if kind is dict and {*map(type, batch.values())} == {Tensor}:
        return list(batch.values()), tuple(batch)
    return _tree.flatten(batch)


def signature(leaf: Any) -> Any:
    """Shape, dtype and device of a tensor; type and value of anything else: 1, 1.0 and True make three programs."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def check_like(call: str, names: tuple[str, str], trees: tuple[Tree, Tree]) -> None:
    """Raise ValueError where the second tree differs from the first in structure, or in a shape, dtype or device."""
    _tree.same_structure(call, names, trees)
    for index, (old, new) in enumerate(zip(*(_tree.leaves(tree) for tree in trees))):
        if signature(old) != signature(new):
            raise ValueError(
                f"{call}: {names[1]} must have the shapes, dtypes and devices of {names[0]}; at "
                f"{_tree.path_of(trees[0], index) or 'its only leaf'} it has {_tree.describe(new)} for "
                f"{_tree.describe(old)}"
            )


def difference(batch: Tree, before: Any, now: Any) -> str:
    """How the signatures of a batch, now, differ from another's: each a pair of structure and leaves."""
    if before[0] != now[0]:
        return f"its structure changed to {_tree.flatten(batch)[1]}"
    for index, (old, new) in enumerate(zip(before[1], now[1])):
        if old != new:
            return f"batch{_tree.path_of(batch, index)} changed from {_told(old)} to {_told(new)}"
    return "it went back to an old one"


def _told(leaf: tuple[Any, ...]) -> str:
    if len(leaf) == 3:
        return f"a {leaf[1]} tensor of shape {tuple(leaf[0])} on {leaf[2]}"
    return f"{leaf[1]!r} (make it a tensor: a number is a constant of the program)"
