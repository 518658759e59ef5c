"""The state of a compiled step, in memory that nothing else uses, returned as the same object."""

from __future__ import annotations

import operator

from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import local
from funcamp._jit.metadata import TensorMetadata, check_like
from funcamp._jit.strides import copy_with_strides, dense_strides, is_more_than_memory
from funcamp._memory import Memory, is_private
from funcamp._types import Tree

_NAMES = ("the first state", "state")


class OwnedState:
    """A state as a tree and as a list of tensors.

    Args:
        tree: the state.
        is_written: whether steps write to it.
    """

    def __init__(self, tree: Tree, *, is_written: bool = True) -> None:
        self.tree = tree
        nodes, self.spec = _tree.flatten(tree)
        self._positions = [index for index, leaf in enumerate(nodes) if leaf is not None]
        self.leaves: list[Tensor] = [nodes[index] for index in self._positions]
        #: The containers of the tree with what is in them; None if one is of an unknown class.
        self._containers = _tree.contents(tree)
        # Callers may give their handles of it other memory; these references keep the original.
        self.statics = [leaf.detach() for leaf in self.leaves] if is_written else []
        #: The memory that steps write.
        self.memory = Memory(self.statics)

    def is_of(self, state: Tree) -> bool:
        """Return whether a state is this one, with no leaf replaced."""
        if state is not self.tree:
            return False
        if self._containers is None:
            leaves, spec = _tree.flatten(state)
            if spec != self.spec:
                return False
            return all(leaves[position] is leaf for position, leaf in zip(self._positions, self.leaves))
        for node, keys, values in self._containers:
            if len(node) != len(values) or (keys is not None and list(node) != keys):
                return False
            if not all(map(operator.is_, node if keys is None else node.values(), values)):
                return False
        return True

    def filled(self, leaves: list[Tensor]) -> Tree:
        """Return a state of the same structure with other tensors."""
        all_leaves: list[Tensor | None] = [None] * self.spec.num_leaves
        for position, leaf in zip(self._positions, leaves):
            all_leaves[position] = leaf
        return _tree.unflatten(all_leaves, self.spec)

    def refill(self, state: Tree, like: Tree) -> None:
        """Copy another state into this one's storage; tensors that callers still have keep their values."""
        check_like(_NAMES, like, state)
        # The values, which may be in the storage.
        values: list[Tensor] = []
        for leaf in _tree.leaves(state):
            if leaf is not None:
                values.append(leaf.detach().clone() if self.memory.meets(leaf) else leaf.detach())

        # New tensors on the storage. The former ones get other memory one by one, and those that no caller has are
        # freed before the next: nothing else may refer to them.
        former_leaves, self.leaves = self.leaves, self.statics
        self.tree = None
        self._containers = []
        self.statics = [static.detach() for static in self.leaves]
        while former_leaves:
            former = local(former_leaves.pop())
            former.set_(former.clone())  # type: ignore[call-overload]

        for leaf, value in zip(self.leaves, values):
            leaf.copy_(value)
        self.tree = self.filled(self.leaves)
        self._containers = _tree.contents(self.tree)


def take_over(
    state: Tree, like: Tree | None, *, avoid: Memory, copy: bool = False, is_written: bool = True
) -> OwnedState:
    """Take over a state: use its memory if torch allocated it and no two leaves share it, else copy.

    Args:
        state: the state.
        like: the metadata of the first state, with the strides that programs were compiled for.
        avoid: memory that must not be written.
        copy: whether to copy all of it.
        is_written: whether steps write to it.

    Raises:
        ValueError: it differs from `like` in structure, or a leaf in shape, dtype or device.
    """
    if like is not None:
        check_like(_NAMES, like, state)
    leaves, spec = _tree.flatten(state)
    expected_metadata: list[TensorMetadata | None] = [None] * len(leaves) if like is None else _tree.leaves(like)
    memory_so_far = Memory()
    own_leaves: list[Tensor | None] = []
    for leaf, expected in zip(leaves, expected_metadata):
        if leaf is None:
            own_leaves.append(None)
            continue
        stride = dense_strides(leaf) if expected is None else expected.stride
        must_copy = copy or not _is_readable(leaf, stride)
        if not must_copy and is_written:
            must_copy = not is_private(leaf) or memory_so_far.meets(leaf) or avoid.meets(leaf)
        own_leaf = copy_with_strides(leaf.detach(), stride) if must_copy else leaf
        memory_so_far.add(own_leaf)
        own_leaves.append(own_leaf)
    # A donated state is returned as the same object.
    is_same = all(map(operator.is_, leaves, own_leaves))
    return OwnedState(state if is_same else _tree.unflatten(own_leaves, spec), is_written=is_written)


def _is_readable(leaf: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether a program for these strides may read a tensor as it is."""
    # Kernels of a GPU assume that a tensor begins at a multiple of 16 bytes.
    is_aligned = leaf.device.type == "cpu" or local(leaf).data_ptr() % 16 == 0
    return is_aligned and leaf.stride() == stride and not leaf.is_inference() and not is_more_than_memory(leaf)
