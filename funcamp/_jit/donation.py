"""The state of a compiled step, in memory that nothing else uses, returned as the same object."""

from __future__ import annotations

import itertools
import operator
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import is_distributed
from funcamp._jit.kinds import Kind, check_like
from funcamp._memory import Memory, is_private, overlaps_itself
from funcamp._types import Tree

_NAMES = ("the first state", "state")


class Owned:
    """A state as a tree and as a list of tensors.

    Args:
        tree: the state.
        strides: the strides that programs were compiled for; by default its own.
        written: whether steps write to it.
    """

    def __init__(self, tree: Tree, strides: list[tuple[int, ...]] | None = None, *, written: bool = True) -> None:
        self.tree = tree
        flat, self.spec = _tree.flatten(tree)
        self._places = [index for index, leaf in enumerate(flat) if leaf is not None]
        self.leaves: list[Tensor] = [flat[index] for index in self._places]
        self.strides = [leaf.stride() for leaf in self.leaves] if strides is None else strides
        self._contents = _tree.contents(tree)
        self.watch(len(self.leaves) or 1)
        # Callers may give their handles of it other memory; these references keep the original.
        self._statics = [leaf.detach() for leaf in self.leaves] if written else []
        #: The memory that steps write.
        self.memory = Memory(self._statics)

    def is_of(self, state: Tree) -> bool:
        """Return whether a state is this one, with no leaf replaced or given other memory or strides in place.

        Raises:
            RuntimeError: a leaf was given other memory or strides at a call that did not check it.
        """
        if state is not self.tree or not self._holds(state):
            return False
        leaves, addresses, strides = next(self._parts)
        if list(map(Tensor.data_ptr, leaves)) == addresses and list(map(Tensor.stride, leaves)) == strides:
            return True
        if self._part >= len(self.leaves):
            return False
        now = zip(self._places, self.leaves, self._statics)
        place = next(place for place, *pair in now if len({(leaf.data_ptr(), leaf.stride()) for leaf in pair}) > 1)
        raise RuntimeError(
            f"jit: state{_tree.path_of(state, place)} must stay where it is in memory, as a CUDA graph writes there; "
            "it was given other memory or strides (by .data, set_, t_): put another tensor in its place"
        )

    def watch(self, part: int) -> None:
        """Check `part` leaves per call, in turn; only for steps that do not read the callers' tensors."""
        self._part = part
        starts = range(0, len(self.leaves), part)
        parts = [(self.leaves[i : i + part], self.strides[i : i + part]) for i in starts] or [([], [])]
        held = [(leaves, list(map(Tensor.data_ptr, leaves)), strides) for leaves, strides in parts]
        self._parts = itertools.cycle(held)

    def _holds(self, state: Tree) -> bool:
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
        """Return a state of the same structure with other tensors."""
        flat: list[Tensor | None] = [None] * self.spec.num_leaves
        for place, leaf in zip(self._places, leaves):
            flat[place] = leaf
        return _tree.unflatten(flat, self.spec)

    def refill(self, state: Tree, like: Tree) -> None:
        """Copy another state into this one's storage; tensors that callers still have keep their values."""
        check_like(_NAMES, like, state)
        values = [leaf for leaf in _tree.leaves(state) if leaf is not None]
        values = [leaf.detach().clone() if self.memory.meets(leaf) else leaf.detach() for leaf in values]
        statics, self._statics = self._statics, [leaf.detach() for leaf in self._statics]
        handles, self.leaves, self.tree, self._contents = self.leaves, statics, None, []
        self._parts = itertools.cycle([])
        while handles:
            handle = handles.pop()
            if sys.getrefcount(handle) > 2:  # more than this name and the call's argument
                handle.set_(handle.clone())  # type: ignore[call-overload]
        for static, value in zip(statics, values):
            static.copy_(value)
        self.tree = self.filled(statics)
        self._contents = _tree.contents(self.tree)
        self.watch(self._part)


def own(state: Tree, like: Tree | None, avoid: Memory, *, copy: bool = False, written: bool = True) -> Owned:
    """Take over a state: use its memory if torch allocated it and no two leaves share it, else copy.

    Args:
        state: the state.
        like: the kinds of the first state, with the strides that programs were compiled for.
        avoid: memory that must not be written.
        copy: whether to copy all of it.
        written: whether steps write to it.

    Raises:
        ValueError: it differs from `like` in structure, or a leaf in shape, dtype or device.
    """
    if like is not None:
        check_like(_NAMES, like, state)
    flat, spec = _tree.flatten(state)
    wanted: list[Kind | None] = [None] * len(flat) if like is None else _tree.leaves(like)
    seen = Memory()
    taken: list[Tensor | None] = []
    for leaf, kind in zip(flat, wanted):
        if leaf is None:
            taken.append(None)
            continue
        overlaps = overlaps_itself(leaf)
        stride = kind.stride if kind is not None else None if overlaps else leaf.stride()
        unfit = copy or overlaps or leaf.requires_grad or leaf.is_inference() or leaf.is_conj() or leaf.is_neg()
        unfit = unfit or leaf.stride() != stride
        if not unfit and written:
            unfit = not is_private(leaf) or seen.meets(leaf) or avoid.meets(leaf)
        if unfit:
            leaf = _laid_out(leaf.detach(), stride)
        seen.add(leaf)
        taken.append(leaf)
    same = all(a is b for a, b in zip(flat, taken))
    return Owned(state if same else _tree.unflatten(taken, spec), written=written)


class Layout(NamedTuple):
    """The memory layout of a batch's tensor that a program reads."""

    stride: tuple[int, ...]
    extent: int
    """The number of bytes from the first to the last."""


def arranged(batch: list[Tensor], layouts: list[Layout], memory: Memory) -> list[Tensor]:
    """Return a batch as a program needs it: in its layouts, outside memory that it writes, without grad."""
    return [
        leaf
        if leaf.stride() == stride and memory.is_free(leaf.data_ptr(), extent) and not _lazy(leaf)
        else _laid_out(leaf.detach(), stride)
        for leaf, (stride, extent) in zip(batch, layouts)
    ]


def layouts_for(batch: list[Tensor]) -> list[Layout]:
    """Return the layouts to compile for: those of the batch, made dense.

    The order of the dimensions stays, because operations pass it on and sums follow it: in another order a sum rounds
    differently from eager code.
    """
    layouts = []
    for leaf in batch:
        like = torch.empty_strided(leaf.shape, leaf.stride(), device="meta")
        layouts.append(Layout(torch.empty_like(like).stride(), leaf.nbytes))
    return layouts


def _lazy(leaf: Tensor) -> bool:
    return leaf.requires_grad or leaf.is_neg() or leaf.is_conj()


def _laid_out(leaf: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    if stride is None or is_distributed(leaf):
        return leaf.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
