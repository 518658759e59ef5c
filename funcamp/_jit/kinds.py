"""`Kind`: what a program knows of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._trace.open_shapes import is_open
from funcamp._types import Tree


@dataclass(frozen=True)
class Kind:
    """Everything about a tensor except its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {self.shape} on {self.device}"


def kinds(tree: Tree) -> Tree:
    """Return a tree with the kinds of its tensors."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([kind_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def kind_of(leaf: Tensor) -> Kind:
    """Return the kind of a tensor."""
    return Kind(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())


def check_like(names: tuple[str, str], like: Tree, tree: Tree) -> None:
    """Raise ValueError if a tree differs from a tree of kinds in structure, shape, dtype or device."""
    _tree.same_structure("jit", names, (like, tree))
    for index, (kind, leaf) in enumerate(zip(_tree.leaves(like), _tree.leaves(tree))):
        if isinstance(kind, Kind) and isinstance(leaf, Tensor):
            found = tuple(leaf.shape), leaf.dtype, leaf.device
            fits = not is_open(leaf) and (kind.shape, kind.dtype, kind.device) == found
        else:
            fits = kind is leaf
        if not fits:
            raise ValueError(
                f"jit: {names[1]} must have the shapes, dtypes and devices of {names[0]}; at "
                f"{_tree.path_of(tree, index) or 'its only leaf'} it has {_tree.describe(leaf)} for {kind}"
            )
