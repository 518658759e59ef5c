"""The position of every tensor of a tree in stored parameters.

In flat storage a group is a one-dimensional tensor, in elements:

    | w, n elements | 0 ... 0 | v, m elements | 0 ... 0 |
    0                         64 k                      size

A matrix starts at a multiple of 128 elements (256 bytes in a two-byte copy of the group), a vector at a multiple of 64
(256 bytes in float32). The rest is zero and has a zero gradient, so it affects no norm and no check.

In storage that is not flat every tensor is a group of its own, in its own shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import identity, rebind
from funcamp._trace.slices import slices
from funcamp._types import Tree

_ALIGNMENT = 128
_ROW_LENGTHS = 4

Groups: TypeAlias = "tuple[Tensor | None, ...]"


class Slot(NamedTuple):
    """The position of one tensor."""

    group: int
    place: int
    """Its index among the tensors of its group."""
    shape: tuple[int, ...]


class Layout:
    """The layout of a tree in groups. Layouts of equal content are one object."""

    spec: _tree.TreeSpec
    """The structure of the tree."""
    leaves: tuple[int | None, ...]
    """For every leaf of the tree the number of its slot (the same for tied leaves), or None for a None."""
    slots: tuple[Slot, ...]
    labels: tuple[str, ...]
    """For every group the label that `group` returned for its tensors."""
    pieces: tuple[tuple[int, ...], ...]
    """For every group the padded sizes of its tensors."""
    columns: tuple[int | None, ...]
    """For every group the row length if all its tensors are matrices with rows of that length, else None."""
    buckets: tuple[int, ...]
    """For every group the number of its bucket: a consecutive part of the tree."""
    flat: bool
    """Whether a group is a one-dimensional tensor; else it is one tensor in its own shape."""

    def __init__(self, *content: Any) -> None:
        self.spec, self.leaves, self.slots, self.labels, self.pieces, self.columns, self.buckets, self.flat = content

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = _tree.unflatten(list(self.leaves), self.spec)  # a pickled TreeSpec depends on torch's version
        return _restore, (numbers, self.slots, self.labels, self.pieces, self.columns, self.buckets, self.flat)

    def views(self, groups: Groups, wanted: Container[int] | None = None) -> list[Tensor | None]:
        """Return a view per slot; None if its group is None, the group itself if its shape is ().

        wanted: the numbers of the slots to view; None for all.
        """
        if not self.flat:
            return [groups[slot.group] for slot in self.slots]
        for group, columns in zip(groups, self.columns):
            if group is not None and group.dim() > (1 if columns is None else 2):
                raise ValueError(
                    f"tree: groups must have no batch dimension; got {tuple(group.shape)}: take the tree under vmap, "
                    "vmap(lambda params: params.tree())(params)"
                )
        chosen: list[list[tuple[int, Slot]]] = [[] for _ in groups]
        for number, slot in enumerate(self.slots):
            if wanted is None or number in wanted:
                chosen[slot.group].append((number, slot))
        views: list[Tensor | None] = [None] * len(self.slots)
        for group, sizes, mine in zip(groups, self.pieces, chosen):
            if group is not None and mine:
                asked = [(slot.place, slot.shape) for _, slot in mine]
                found = slices(group, sizes, asked) if group.dim() else [group] * len(mine)
                for (number, _), view in zip(mine, found):
                    views[number] = view
        return views

    def join(self, values: Sequence[Tensor | None]) -> Groups:
        """Return one tensor per group from one per slot, in one dtype; None for a group without values."""
        if not self.flat:
            return tuple(values)
        parts: list[list[Tensor]] = [[] for _ in self.pieces]
        for slot, value in zip(self.slots, values):
            if value is None:
                continue
            columns = self.columns[slot.group]
            parts[slot.group].append(value.reshape(-1) if columns is None else value.reshape(-1, columns))
            if padding := self.pieces[slot.group][slot.place] - value.numel():
                parts[slot.group].append(value.new_zeros(padding))
        return tuple(torch.cat(part).reshape(-1) if part else None for part in parts)

    def take(self, tensors: Sequence[Tensor]) -> Groups:
        """Make groups as `join` does, but turn each tensor into a view of its group, one by one."""
        if not self.flat:
            copies = []
            for tensor in tensors:
                copies.append(tensor.detach().clone())
                rebind(tensor, copies[-1])
            return tuple(copies)
        groups: list[Tensor | None] = [None] * len(self.pieces)
        for number, sizes in enumerate(self.pieces):
            mine = [(slot, tensor) for slot, tensor in zip(self.slots, tensors) if slot.group == number]
            group = groups[number] = mine[0][1].detach().new_empty(sum(sizes))
            for (_, tensor), piece in zip(mine, torch.split(group, list(sizes))):
                piece[tensor.numel() :].zero_()
                rebind(tensor, piece[: tensor.numel()].view(tensor.shape).copy_(tensor))
        return tuple(groups)

    def last_first(self) -> list[int]:
        """Return the groups' numbers from the end of the tree: the order in which gradients complete."""
        return sorted(range(len(self.buckets)), key=lambda number: -self.buckets[number])

    def tree(self, values: Sequence[Any]) -> Tree:
        """Return the tree with one value per slot."""
        return _tree.unflatten([None if slot is None else values[slot] for slot in self.leaves], self.spec)

    def label_of(self) -> dict[str, str]:
        """Return the label of every leaf, by the leaf's name."""
        tree = self.tree([self.labels[slot.group] for slot in self.slots])
        return {name: label for name, label in zip(_tree.names(tree), _tree.leaves(tree)) if label is not None}


_layouts: dict[Any, Layout] = {}


def _intern(*content: Any) -> Layout:
    return _layouts.setdefault(content, Layout(*content))


def _restore(numbers: Tree, *content: Any) -> Layout:
    leaves, spec = _tree.flatten(numbers)
    return _intern(spec, tuple(leaves), *content)


def arrange(
    call: str,
    params: Tree,
    group: Callable[[str, Tensor], str],
    apart: Callable[[str, Tensor], object] = lambda *_: None,
    buckets: int = 1,
    *,
    flat: bool = True,
) -> tuple[Layout, list[Tensor]]:
    """Return the layout of a tree and its tensors, one per slot.

    Flat: one group per label, dtype, device, value of apart and bucket; buckets are consecutive parts of the tree.
    Else: one group per tensor.
    """
    leaves, spec = _tree.parameters(call, "params", params)
    size_of_all = sum(leaf.numel() for leaf in leaves if leaf is not None)
    size_before = 0
    first: dict[Any, int] = {}
    slot_of_leaf: list[int | None] = []
    tensors: list[Tensor] = []
    labels: list[str] = []
    keys: list[tuple[Any, ...]] = []
    for name, leaf in zip(_tree.names(params), leaves):
        if leaf is None:
            slot_of_leaf.append(None)
            continue
        label = group(name, leaf)
        if not isinstance(label, str):
            raise TypeError(f"{call}: group must return a string; got {label!r} for {name!r}")
        number = first.setdefault(identity(leaf), len(tensors))
        slot_of_leaf.append(number)
        if number == len(tensors):
            bucket = size_before * buckets // max(size_of_all, 1)
            tensors.append(leaf)
            labels.append(label)
            keys.append((label, leaf.dtype, leaf.device, str(apart(name, leaf)), bucket))
            size_before += leaf.numel()
        elif labels[number] != label:
            raise ValueError(
                f"{call}: group must return the same for every name of a tensor; got {labels[number]!r} and {label!r} "
                f"for {name!r}"
            )
    if not flat:
        return _tensor_by_tensor(spec, slot_of_leaf, tensors, labels), tensors
    rows = _row_lengths(keys, tensors, _ROW_LENGTHS * buckets)
    slots: list[Slot] = []
    pieces: dict[Any, list[int]] = {}
    for key, length, leaf in zip(keys, rows, tensors):
        sizes = pieces.setdefault((key, length), [])
        slots.append(Slot(list(pieces).index((key, length)), len(sizes), tuple(leaf.shape)))
        unit = _ALIGNMENT if leaf.dim() > 1 else _ALIGNMENT // 2
        sizes.append(-(-leaf.numel() // unit) * unit)
    layout = _intern(
        spec,
        tuple(slot_of_leaf),
        tuple(slots),
        tuple(key[0] for key, _ in pieces),
        tuple(tuple(sizes) for sizes in pieces.values()),
        tuple(length for _, length in pieces),
        tuple(key[-1] for key, _ in pieces),
        True,
    )
    return layout, tensors


def _tensor_by_tensor(
    spec: _tree.TreeSpec, slot_of_leaf: list[int | None], tensors: list[Tensor], labels: list[str]
) -> Layout:
    """Return the layout in which every tensor is a group of its own."""
    count = len(tensors)
    slots = [Slot(number, 0, tuple(tensor.shape)) for number, tensor in enumerate(tensors)]
    pieces = [(tensor.numel(),) for tensor in tensors]
    return _intern(
        spec, tuple(slot_of_leaf), tuple(slots), tuple(labels), tuple(pieces), (None,) * count, (0,) * count, False
    )


def _row_lengths(keys: list[tuple[Any, ...]], tensors: list[Tensor], most: int) -> list[int | None]:
    """Return the row length of every tensor that is grouped by row length, None for the rest.

    Inductor never performs a concatenation of matrices along their rows: each product that computes a weight's gradient
    writes directly into its slice. One-dimensional pieces it copies.
    """
    likes = [
        (key, leaf.shape[1]) if leaf.dim() == 2 and leaf.numel() % _ALIGNMENT == 0 else None
        for key, leaf in zip(keys, tensors)
    ]
    sizes: Counter[Any] = Counter()
    for like, leaf in zip(likes, tensors):
        sizes[like] += leaf.numel()
    del sizes[None]
    chosen = {like for like, size in sizes.most_common(most) if size}
    return [like[1] if like is not None and like in chosen else None for like in likes]
