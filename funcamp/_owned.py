"""The state that a compiled step works on: in storage that nothing else of it shares, given back as one object."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._signature import check_like
from funcamp._types import Tree


class Owned:
    """A state as a tree and as a list of tensors."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        flat, self.spec = _tree.flatten(tree)
        self._places = [index for index, leaf in enumerate(flat) if leaf is not None]
        self.leaves: list[Tensor] = [flat[index] for index in self._places]
        self.storages = {leaf.untyped_storage()._cdata for leaf in self.leaves}
        self._contents = _tree.contents(tree)

    def is_of(self, state: Tree) -> bool:
        """Whether a state is this one, no leaf of it replaced since."""
        if state is not self.tree:
            return False
        if self._contents is None:
            flat = _tree.leaves(state)
            return len(flat) == self.spec.num_leaves and all(
                flat[place] is leaf for place, leaf in zip(self._places, self.leaves)
            )
        for node, held in self._contents:
            if len(node) != len(held):
                return False
            if not all(map(operator.is_, node.values() if isinstance(node, dict) else node, held)):
                return False
        return True

    def filled(self, leaves: list[Tensor]) -> Tree:
        """A state of the same structure, of other tensors."""
        flat: list[Tensor | None] = [None] * self.spec.num_leaves
        for place, leaf in zip(self._places, leaves):
            flat[place] = leaf
        return _tree.unflatten(flat, self.spec)

    def refill(self, state: Tree) -> None:
        """Copy another state into this one's storage; what callers still hold of this one keeps its values."""
        check_like("jit", ("the first state", "state"), (self.tree, state))
        given = [leaf for leaf in _tree.leaves(state) if leaf is not None]
        handles, self.leaves, self.tree, self._contents = self.leaves, [], None, []
        handles.reverse()
        with torch.no_grad():
            for value in given:
                handle = handles.pop()
                static = handle.detach()
                if sys.getrefcount(handle) > 2:  # this name and the call's: else nobody holds it
                    handle.set_(handle.clone())  # type: ignore[call-overload]
                static.copy_(value)
                self.leaves.append(static)
        self.tree = self.filled(self.leaves)
        self._contents = _tree.contents(self.tree)


def own(state: Tree, like: Owned | None, *, copy: bool) -> Owned:
    """Take a state over: its own storage where no two leaves share one, copies of the rest (of all with `copy`).

    Raises:
        TypeError: a leaf is neither a strided tensor nor None.
        ValueError: it differs from `like` in structure, or a leaf in shape, dtype or device.
    """
    flat, spec = _tree.tensors("jit", "state", state)
    for index, leaf in enumerate(flat):
        if leaf is not None and leaf.layout != torch.strided:
            raise TypeError(f"jit: state{_tree.path_of(state, index)} must be strided; got layout {leaf.layout}")
    if like is not None:
        check_like("jit", ("the first state", "state"), (like.tree, state))
    wanted = iter([] if like is None else like.leaves)
    seen: set[Any] = set()
    taken: list[Tensor | None] = []
    for leaf in flat:
        if leaf is None:
            taken.append(None)
            continue
        stride = leaf.stride() if like is None else next(wanted).stride()
        storage = leaf.untyped_storage()._cdata
        unfit = copy or leaf.requires_grad or leaf.is_inference()
        if unfit or leaf.stride() != stride or storage in seen or _overlaps_itself(leaf):
            leaf = _laid_out(leaf.detach(), None if _overlaps_itself(leaf) and like is None else stride)
        seen.add(leaf.untyped_storage()._cdata if leaf.numel() else object())
        taken.append(leaf)
    return Owned(state if all(a is b for a, b in zip(flat, taken)) else _tree.unflatten(taken, spec))


def arranged(batch: list[Tensor], strides: list[tuple[int, ...]], owned: Owned) -> list[Tensor]:
    """A batch in the strides that a program was compiled for, nothing of it in the state's storage."""
    return [
        leaf
        if leaf.stride() == stride and leaf.untyped_storage()._cdata not in owned.storages
        else _laid_out(leaf.detach(), stride)
        for leaf, stride in zip(batch, strides)
    ]


def strides_for(batch: list[Tensor]) -> list[tuple[int, ...]]:
    """The strides to compile for: a batch's own where they are dense in a common order, else contiguous ones."""
    return [
        leaf.stride()
        if leaf.is_contiguous() or (leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last))
        else torch.empty(leaf.shape, device="meta").stride()
        for leaf in batch
    ]


def _laid_out(leaf: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    if stride is None:
        return leaf.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _overlaps_itself(leaf: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape))
