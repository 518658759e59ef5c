"""The state that a compiled step works on: in memory that nothing else lies in, given back as one object."""

from __future__ import annotations

import itertools
import operator
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._distributed.dtensor import is_distributed
from funcamp._jit.signature import Kind, check_like
from funcamp._memory import Memory, is_private
from funcamp._step.state import states, with_own_copies
from funcamp._types import Tree

_NAMES = ("the first state", "state")


class Owned:
    """A state as a tree and as a list of tensors.

    Args:
        tree: the state.
        strides: those that programs were compiled for; its own by default.
        written: whether steps write to it.
    """

    def __init__(self, tree: Tree, strides: list[tuple[int, ...]] | None = None, *, written: bool = True) -> None:
        self._tree, self._states = tree, states(tree)
        flat, self.spec = _tree.flatten(tree)
        self._places = [index for index, leaf in enumerate(flat) if leaf is not None]
        self.leaves: list[Tensor] = [flat[index] for index in self._places]
        self.strides = [leaf.stride() for leaf in self.leaves] if strides is None else strides
        self._contents = _tree.contents(tree)
        self.watch(len(self.leaves) or 1)
        # What callers have of it may be given other memory; this may not.
        self._statics = [leaf.detach() for leaf in self.leaves] if written else []
        #: Where steps write.
        self.memory = Memory(self._statics)

    @property
    def tree(self) -> Tree:
        """The state as it is given back; its compute copies are noted to be those of its parameters."""
        for node in self._states:
            node.copies.note(node.params)
        return self._tree

    def is_of(self, state: Tree) -> bool:
        """Whether a state is this one, nothing in it replaced since, nor given other memory or strides in place.

        Parameters that were written in place since it was given back do not count as this one's, if they have copies.

        Raises:
            RuntimeError: a leaf was given others at a call that did not look at it.
        """
        if state is not self._tree or not self._holds(state):
            return False
        if not all(node.copies.are_of(node.params) for node in self._states):
            return False
        leaves, addresses, strides = next(self._parts)
        if list(map(Tensor.data_ptr, leaves)) == addresses and list(map(Tensor.stride, leaves)) == strides:
            return True
        if self._part >= len(self.leaves):
            return False
        now = zip(self._places, self.leaves, self._statics)
        place = next(place for place, *pair in now if len({(leaf.data_ptr(), leaf.stride()) for leaf in pair}) > 1)
        raise RuntimeError(
            f"jit: state{_tree.path_of(state, place)} must stay where it is in memory, for a CUDA graph writes there; "
            "it was given other memory or strides (by .data, set_, t_): put another tensor in its place"
        )

    def watch(self, part: int) -> None:
        """Look at so many leaves at each call in turn; only steps that do not read callers' tensors may skip some."""
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
        """A state of the same structure, of other tensors."""
        flat: list[Tensor | None] = [None] * self.spec.num_leaves
        for place, leaf in zip(self._places, leaves):
            flat[place] = leaf
        return _tree.unflatten(flat, self.spec)

    def refill(self, state: Tree, like: Tree) -> None:
        """Copy another state into this one's storage; what callers still hold of this one keeps its values."""
        check_like(_NAMES, like, state)
        values = [leaf for leaf in _tree.leaves(with_own_copies(state)) if leaf is not None]
        values = [leaf.detach().clone() if self.memory.meets(leaf) else leaf.detach() for leaf in values]
        statics, self._statics = self._statics, [leaf.detach() for leaf in self._statics]
        handles, self.leaves, self._tree, self._contents = self.leaves, statics, None, []
        self._states = []
        self._parts = itertools.cycle([])
        while handles:
            handle = handles.pop()
            if sys.getrefcount(handle) > 2:  # this name and the call's: else nobody holds it
                handle.set_(handle.clone())  # type: ignore[call-overload]
        for static, value in zip(statics, values):
            static.copy_(value)
        self._tree = self.filled(statics)
        self._states, self._contents = states(self._tree), _tree.contents(self._tree)
        self.watch(self._part)


def own(state: Tree, like: Tree | None, avoid: Memory, *, copy: bool = False, written: bool = True) -> Owned:
    """Take a state over: its own memory if torch allocated it and no two leaves share it, else copies.

    Args:
        state: the state.
        like: the kinds of the first one, with the strides that programs were compiled for.
        avoid: memory that is not to be written.
        copy: take none of its memory.
        written: whether steps write to it.

    Raises:
        ValueError: it differs from `like` in structure, or a leaf in shape, dtype or device.
    """
    if like is not None:
        check_like(_NAMES, like, state)
    state = with_own_copies(state)
    flat, spec = _tree.flatten(state)
    wanted: list[Kind | None] = [None] * len(flat) if like is None else _tree.leaves(like)
    seen = Memory()
    taken: list[Tensor | None] = []
    for leaf, kind in zip(flat, wanted):
        if leaf is None:
            taken.append(None)
            continue
        overlaps = _overlaps_itself(leaf)
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
    """How a batch's tensor lies in memory when a program reads it."""

    stride: tuple[int, ...]
    extent: int
    """Bytes from the first to the last."""


def arranged(batch: list[Tensor], layouts: list[Layout], memory: Memory | None) -> list[Tensor]:
    """A batch as a program was compiled for it: its layouts, nothing in memory that will be written, no grad."""
    return [
        leaf
        if leaf.stride() == stride and (memory is None or memory.is_free(leaf.data_ptr(), extent)) and not _lazy(leaf)
        else _laid_out(leaf.detach(), stride)
        for leaf, (stride, extent) in zip(batch, layouts)
    ]


def layouts_for(batch: list[Tensor]) -> list[Layout]:
    """The layouts to compile for: a batch's own where they are dense in a common order, else contiguous ones."""
    return [
        Layout(leaf.stride(), leaf.numel() * leaf.element_size())
        if leaf.is_contiguous() or (leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last))
        else Layout(torch.empty(leaf.shape, device="meta").stride(), leaf.numel() * leaf.element_size())
        for leaf in batch
    ]


def _lazy(leaf: Tensor) -> bool:
    return leaf.requires_grad or leaf.is_neg() or leaf.is_conj()


def _laid_out(leaf: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    if stride is None or is_distributed(leaf):
        return leaf.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _overlaps_itself(leaf: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(leaf.stride(), leaf.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
