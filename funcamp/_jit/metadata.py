"""`TensorMetadata`: what a program knows of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._trace.open_shapes import is_open
from funcamp._types import Tree


@dataclass(frozen=True)
class TensorMetadata:
    """Everything about a tensor except its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {self.shape} on {self.device}"


def metadata_of(leaf: Tensor) -> TensorMetadata:
    """Return the metadata of a tensor."""
    return TensorMetadata(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())


def metadata_in(tree: Tree) -> Tree:
    """Return a tree with the metadata of its tensors in their place."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([metadata_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def check_like(names: tuple[str, str], like: Tree, tree: Tree) -> None:
    """Raise ValueError if a tree differs from a tree of metadata in structure, shape, dtype or device."""
    like_name, tree_name = names
    _tree.same_structure("jit", names, (like, tree))
    for index, (expected, leaf) in enumerate(zip(_tree.leaves(like), _tree.leaves(tree))):
        if isinstance(expected, TensorMetadata) and isinstance(leaf, Tensor):
            # Not the strides: a tensor with others is copied.
            described = expected.shape, expected.dtype, expected.device
            is_alike = not is_open(leaf) and (tuple(leaf.shape), leaf.dtype, leaf.device) == described
        else:
            is_alike = expected is leaf
        if not is_alike:
            raise ValueError(
                f"jit: {tree_name} must have the shapes, dtypes and devices of {like_name}; at "
                f"{_tree.path_of(tree, index) or 'its only leaf'} it has {_tree.describe(leaf)} for {expected}"
            )
