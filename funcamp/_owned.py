"""The state that a compiled step works on: in storage that nothing else of it shares, given back as one object."""

from __future__ import annotations

import operator
import sys
from collections.abc import Set

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._signature import Kind, check_like
from funcamp._types import Tree

_NAMES = ("the first state", "state")


class Owned:
    """A state as a tree and as a list of tensors."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        flat, self.spec = _tree.flatten(tree)
        self._places = [index for index, leaf in enumerate(flat) if leaf is not None]
        self.leaves: list[Tensor] = [flat[index] for index in self._places]
        self.storages = {storage_of(leaf) for leaf in self.leaves}
        self._contents = _tree.contents(tree)

    def is_of(self, state: Tree) -> bool:
        """Whether a state is this one, nothing in it replaced since."""
        if state is not self.tree:
            return False
        if self._contents is None:
            flat, spec = _tree.flatten(state)
            return spec == self.spec and all(flat[place] is leaf for place, leaf in zip(self._places, self.leaves))
        for node, keys, held in self._contents:
            if len(node) != len(held) or (keys is not None and list(node) != keys):
                return False
            if not all(map(operator.is_, node if keys is None else node.values(), held)):
                return False
        return True

    def filled(self, leaves: list[Tensor]) -> Tree:
        """A state of the same structure, of other tensors."""
        flat: list[Tensor | None] = [None] * self.spec.num_leaves
        for place, leaf in zip(self._places, leaves):
            flat[place] = leaf
        return _tree.unflatten(flat, self.spec)

    def refill(self, state: Tree, like: Tree) -> None:
        """Copy another state into this one's storage; what callers still hold of this one keeps its values."""
        check_like(_NAMES, like, state)
        values = [leaf for leaf in _tree.leaves(state) if leaf is not None]
        values = [leaf.detach().clone() if storage_of(leaf) in self.storages else leaf.detach() for leaf in values]
        statics = [leaf.detach() for leaf in self.leaves]
        handles, self.leaves, self.tree, self._contents = self.leaves, statics, None, []
        while handles:
            handle = handles.pop()
            if sys.getrefcount(handle) > 2:  # this name and the call's: else nobody holds it
                handle.set_(handle.clone())  # type: ignore[call-overload]
        for static, value in zip(statics, values):
            static.copy_(value)
        self.tree = self.filled(statics)
        self._contents = _tree.contents(self.tree)


def own(state: Tree, like: Tree | None, avoid: Set[int], *, copy: bool) -> Owned:
    """Take a state over: its own storage where no two leaves share one, copies of the rest (of all with `copy`).

    Args:
        state: the state.
        like: the kinds of the first one, with the strides that programs were compiled for.
        avoid: storages that are not to be written.
        copy: take none of its storage.

    Raises:
        TypeError: a leaf is neither a strided tensor nor None.
        ValueError: it differs from `like` in structure, or a leaf in shape, dtype or device.
    """
    flat, spec = _tree.tensors("jit", "state", state)
    for index, leaf in enumerate(flat):
        if leaf is not None and leaf.layout != torch.strided:
            raise TypeError(f"jit: state{_tree.path_of(state, index)} must be strided; got layout {leaf.layout}")
    if like is not None:
        check_like(_NAMES, like, state)
    wanted: list[Kind | None] = [None] * len(flat) if like is None else _tree.leaves(like)
    seen = set(avoid)
    taken: list[Tensor | None] = []
    for leaf, kind in zip(flat, wanted):
        if leaf is None:
            taken.append(None)
            continue
        overlaps = _overlaps_itself(leaf)
        stride = kind.stride if kind is not None else None if overlaps else leaf.stride()
        unfit = copy or overlaps or leaf.requires_grad or leaf.is_inference() or leaf.is_conj() or leaf.is_neg()
        if unfit or leaf.stride() != stride or storage_of(leaf) in seen:
            leaf = _laid_out(leaf.detach(), stride)
        if leaf.numel():
            seen.add(storage_of(leaf))
        taken.append(leaf)
    return Owned(state if all(a is b for a, b in zip(flat, taken)) else _tree.unflatten(taken, spec))


def arranged(batch: list[Tensor], strides: list[tuple[int, ...]], owned: Owned) -> list[Tensor]:
    """A batch in the strides that a program was compiled for, nothing of it in the state's storage, no grad in it."""
    return [
        leaf
        if leaf.stride() == stride and storage_of(leaf) not in owned.storages and not _lazy(leaf)
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


def storage_of(leaf: Tensor) -> int:
    """What tells a tensor's storage from another."""
    told: int = leaf.untyped_storage()._cdata
    return told


def _lazy(leaf: Tensor) -> bool:
    return leaf.requires_grad or leaf.is_neg() or leaf.is_conj()


def _laid_out(leaf: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    if stride is None:
        return leaf.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _overlaps_itself(leaf: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(leaf.stride(), leaf.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
