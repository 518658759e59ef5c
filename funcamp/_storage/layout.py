"""The position of every tensor of a tree in stored parameters.

In flat storage a group is a one-dimensional tensor, in elements:

    | w, n elements | 0 ... 0 | v, m elements | 0 ... 0 |
    0                         64 k                      size

A matrix starts at a multiple of 128 elements (256 bytes in a two-byte cast of the group), a vector at a multiple of 64
(256 bytes in float32). The rest is zero and has a zero gradient, so it affects no norm and no check.

In storage that is not flat every tensor is a separate group, in its own shape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import identity
from funcamp._types import Tree

#: The number of elements at a multiple of which a matrix starts; a vector at half of it.
_ALIGNMENT = 128
#: The number of row lengths whose matrices get a separate group: those with the most elements.
_MAX_ROW_LENGTHS = 4

#: One tensor per group; None for a group without values.
Groups: TypeAlias = "tuple[Tensor | None, ...]"


# The fingerprint of a saved sharded state is of this class's repr (`distributed/checkpoint.py`): its name and those of
# its fields are in files.
class Slot(NamedTuple):
    """The position of one tensor."""

    group: int
    place: int
    """Its index among the tensors of its group."""
    shape: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Layout:
    """The layout of a tree in groups. Layouts of equal content are one object (`_interned`)."""

    spec: _tree.TreeSpec
    """The structure of the tree."""
    leaves: tuple[int | None, ...]
    """For every leaf of the tree the number of its slot (the same for tied leaves), or None for a None."""
    slots: tuple[Slot, ...]
    labels: tuple[str, ...]
    """For every group the label that `group` returned for its tensors."""
    padded_sizes: tuple[tuple[int, ...], ...]
    """For every group the padded sizes of its tensors."""
    row_lengths: tuple[int | None, ...]
    """For every group the row length if all its tensors are matrices with rows of that length, else None."""
    buckets: tuple[int, ...]
    """For every group the number of its bucket: a consecutive part of the tree."""
    flat: bool
    """Whether a group is a one-dimensional tensor; else it is one tensor in its own shape."""

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled TreeSpec depends on torch's version, so the structure is saved as a tree of numbers of slots.
        slot_numbers = self.tree(range(len(self.slots)))
        _spec, _leaves, *content = vars(self).values()
        return _restore, (slot_numbers, *content)

    def views(self, groups: Groups) -> list[Tensor | None]:
        """Return a view per slot; None if its group is None, the group itself if its shape is ()."""
        if not self.flat:
            return [groups[slot.group] for slot in self.slots]
        parts_by_group: list[Sequence[Tensor | None]] = []
        for group, padded_sizes in zip(groups, self.padded_sizes):
            if group is None or not group.dim():
                parts_by_group.append([group] * len(padded_sizes))
                continue
            _refuse_batch_dimension(group)
            parts_by_group.append(torch.split(group, list(padded_sizes)))
        return [_view(parts_by_group[slot.group][slot.place], slot.shape) for slot in self.slots]

    def join(self, values: Sequence[Tensor | None]) -> Groups:
        """Return one tensor per group from one per slot, in one dtype; None for a group without values."""
        if not self.flat:
            return tuple(values)
        pieces_by_group: list[list[Tensor]] = [[] for _ in self.padded_sizes]
        for slot, value in zip(self.slots, values):
            if value is None:
                continue
            pieces = pieces_by_group[slot.group]
            # Matrices with equal rows are concatenated as matrices (`_row_lengths`).
            row_length = self.row_lengths[slot.group]
            pieces.append(value.reshape(-1) if row_length is None else value.reshape(-1, row_length))
            padding = self.padded_sizes[slot.group][slot.place] - value.numel()
            if padding:
                pieces.append(value.new_zeros(padding))
        return tuple(torch.cat(pieces).reshape(-1) if pieces else None for pieces in pieces_by_group)

    def last_first(self) -> list[int]:
        """Return the groups' numbers from the end of the tree: the order in which gradients complete."""
        return sorted(range(len(self.buckets)), key=lambda number: -self.buckets[number])

    def tree(self, values: Sequence[object]) -> Tree:
        """Return the tree with one value per slot."""
        return _tree.unflatten([None if slot is None else values[slot] for slot in self.leaves], self.spec)

    def label_of(self) -> dict[str, str]:
        """Return the label of every leaf, by the leaf's name."""
        tree = self.tree([self.labels[slot.group] for slot in self.slots])
        names = _tree.names(tree)
        return {name: label for name, label in zip(names, _tree.leaves(tree)) if label is not None}


def _refuse_batch_dimension(group: Tensor) -> None:
    """Raise ValueError if a group is of several trees, as the result of a vmap is."""
    if group.dim() > 1:
        raise ValueError(
            f"tree: groups must have no batch dimension; got {tuple(group.shape)}: take the tree under vmap, "
            "vmap(lambda params: params.tree())(params)"
        )


def _view(part: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a part of a group in its shape and without padding; None, and one number for a group, as they are."""
    if part is None or not part.dim():
        return part
    count = math.prod(shape)
    if count != part.shape[0]:  # the rest is padding
        part = part[:count]
    return part.view(shape)


#: Every layout by its content.
_layouts: dict[object, Layout] = {}


def _interned(layout: Layout) -> Layout:
    """Return the one layout of this content."""
    return _layouts.setdefault(tuple(vars(layout).values()), layout)


# Its name and the order of its arguments are in files of pickled parameters.
def _restore(slot_numbers: Tree, *content: Any) -> Layout:
    """Return the layout that was pickled; invert `Layout.__reduce__`."""
    leaves, spec = _tree.flatten(slot_numbers)
    return _interned(Layout(spec, tuple(leaves), *content))


class GroupKey(NamedTuple):
    """What the tensors of one group of flat storage have in common, besides the length of their rows."""

    label: str
    dtype: torch.dtype
    device: torch.device
    is_uncast: bool
    """Whether autocast does not cast the tensor."""
    bucket: int


def arrange(
    call: str,
    params: Tree,
    group: Callable[[str, Tensor], str],
    uncast_names: AbstractSet[str] = frozenset(),
    buckets: int = 1,
    *,
    flat: bool = True,
) -> tuple[Layout, list[Tensor]]:
    """Return the layout of a tree and its tensors, one per slot.

    Flat: one group per label, dtype, device and bucket, and per row length of matrices, and others for what autocast
    does not cast; buckets are consecutive parts of the tree. Else: one group per tensor.

    Args:
        call: the public function, for errors.
        params: a pytree of tensors; None passes through.
        group: returns the label of a leaf, given its name and the leaf. Names of one tensor must have one label.
        uncast_names: the leaves that autocast does not cast.
        buckets: the number of buckets.
        flat: whether a group is a one-dimensional tensor.

    Raises:
        TypeError: a leaf is not a floating-point or complex tensor, or group did not return a string.
        ValueError: group returned different labels for two names of a tensor.
    """
    leaves, spec = _tree.parameters(call, "params", params)
    size_of_all = sum(leaf.numel() for leaf in leaves if leaf is not None)
    size_before = 0
    slot_by_identity: dict[object, int] = {}
    slot_of_leaf: list[int | None] = []
    tensors: list[Tensor] = []
    keys: list[GroupKey] = []
    for name, leaf in zip(_tree.names(params), leaves):
        if leaf is None:
            slot_of_leaf.append(None)
            continue
        label = group(name, leaf)
        if not isinstance(label, str):
            raise TypeError(f"{call}: group must return a string; got {label!r} for {name!r}")
        number = slot_by_identity.setdefault(identity(leaf), len(tensors))
        slot_of_leaf.append(number)
        is_new = number == len(tensors)
        if is_new:
            bucket = size_before * buckets // max(size_of_all, 1) if flat else 0
            tensors.append(leaf)
            keys.append(GroupKey(label, leaf.dtype, leaf.device, name in uncast_names, bucket))
            size_before += leaf.numel()
        elif keys[number].label != label:
            raise ValueError(
                f"{call}: group must return the same for every name of a tensor; got {keys[number].label!r} and "
                f"{label!r} for {name!r}"
            )
    row_lengths = _row_lengths(keys, tensors, _MAX_ROW_LENGTHS * buckets if flat else 0)
    return _layout(spec, slot_of_leaf, tensors, keys, row_lengths, flat=flat), tensors


def _layout(
    spec: _tree.TreeSpec,
    slot_of_leaf: list[int | None],
    tensors: list[Tensor],
    keys: list[GroupKey],
    row_lengths: list[int | None],
    *,
    flat: bool,
) -> Layout:
    """Return the layout in which the tensors of one key, and of one row length, are a group; else each is one."""
    group_numbers: dict[object, int] = {}
    members: list[list[int]] = []
    slots: list[Slot] = []
    for number, tensor in enumerate(tensors):
        shared = (keys[number], row_lengths[number]) if flat else number
        group_number = group_numbers.setdefault(shared, len(members))
        if group_number == len(members):
            members.append([])
        slots.append(Slot(group_number, len(members[group_number]), tuple(tensor.shape)))
        members[group_number].append(number)
    sizes = [_padded_size(tensor) if flat else tensor.numel() for tensor in tensors]
    first_members = [numbers[0] for numbers in members]
    layout = Layout(
        spec,
        tuple(slot_of_leaf),
        tuple(slots),
        labels=tuple([keys[first].label for first in first_members]),
        padded_sizes=tuple([tuple([sizes[number] for number in numbers]) for numbers in members]),
        row_lengths=tuple([row_lengths[first] for first in first_members]),
        buckets=tuple([keys[first].bucket for first in first_members]),
        flat=flat,
    )
    return _interned(layout)


def _padded_size(tensor: Tensor) -> int:
    """Return the number of elements of a tensor and of the zeros after it."""
    alignment = _ALIGNMENT if tensor.dim() > 1 else _ALIGNMENT // 2
    units = -(-tensor.numel() // alignment)  # rounded up
    return units * alignment


def _row_lengths(keys: list[GroupKey], tensors: list[Tensor], max_row_lengths: int) -> list[int | None]:
    """Return the row length of every tensor that is grouped by row length, None for the rest.

    Inductor never performs a concatenation of matrices along their rows: each product that computes a weight's gradient
    writes directly into its slice. One-dimensional pieces it copies.

    Args:
        keys: the key of each tensor.
        tensors: the tensors.
        max_row_lengths: how many pairs of key and row length get a group: those with the most elements.
    """
    # Padding between matrices would not be a row, so each must fill whole units.
    row_keys: list[tuple[GroupKey, int] | None] = []
    sizes: Counter[tuple[GroupKey, int]] = Counter()
    for key, tensor in zip(keys, tensors):
        is_unpadded_matrix = tensor.dim() == 2 and tensor.numel() % _ALIGNMENT == 0
        row_key = (key, tensor.shape[1]) if is_unpadded_matrix else None
        row_keys.append(row_key)
        if row_key is not None:
            sizes[row_key] += tensor.numel()
    largest = {row_key for row_key, size in sizes.most_common(max_row_lengths) if size}
    return [row_key[1] if row_key is not None and row_key in largest else None for row_key in row_keys]
