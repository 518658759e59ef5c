"""Flat storage: many tensors in a few one-dimensional ones, so that a pytree function is a few kernels.

A group, in elements of its one-dimensional tensor:

    | w, n elements | 0 ... 0 | v, m elements | 0 ... 0 |
    0                         64 k                      size

A matrix starts at a multiple of 128 elements (256 bytes in a two-byte copy of the group), a vector at one of 64 (256
bytes in float32). The rest is zero and has a zero gradient, so no norm or check sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree

_ALIGNMENT = 128
_ROW_LENGTHS = 4

Groups: TypeAlias = "tuple[Tensor | None, ...]"


class Slot(NamedTuple):
    """Where one tensor lies."""

    group: int
    place: int
    """Its place among the tensors of its group."""
    shape: tuple[int, ...]


class Layout:
    """How a tree lies in its groups. Layouts with one content are one object: equality is identity."""

    spec: _tree.TreeSpec
    """The structure of the tree."""
    leaves: tuple[int | None, ...]
    """For every leaf of the tree the number of its slot, one number for tied leaves; None for a None."""
    slots: tuple[Slot, ...]
    labels: tuple[str, ...]
    """For every group what `group` returned for its tensors."""
    pieces: tuple[tuple[int, ...], ...]
    """For every group the padded sizes of its tensors."""
    columns: tuple[int | None, ...]
    """For every group the length of a row, where all its tensors are matrices with rows of one length, else None."""

    def __init__(self, *content: Any) -> None:
        self.spec, self.leaves, self.slots, self.labels, self.pieces, self.columns = content

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = _tree.unflatten(list(self.leaves), self.spec)  # a TreeSpec's own pickle is tied to torch's version
        return _restore, (numbers, self.slots, self.labels, self.pieces, self.columns)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def views(self, groups: Groups) -> list[Tensor | None]:
        """A view for every slot; None for those of a group that is None, the group itself where its shape is ()."""
        parts: list[Any] = [
            None if group is None else torch.split(group, list(sizes)) if group.dim() else [group] * len(sizes)
            for group, sizes in zip(groups, self.pieces)
        ]
        views: list[Tensor | None] = []
        for slot in self.slots:
            part = parts[slot.group]
            piece = None if part is None else part[slot.place]
            views.append(piece if piece is None or not piece.dim() else piece[: _count(slot.shape)].view(slot.shape))
        return views

    def join(self, values: Sequence[Tensor | None]) -> Groups:
        """One tensor a group from one a slot, promoted to one type; None for a group whose first value is."""
        parts: list[list[Tensor]] = [[] for _ in self.pieces]
        for slot, value in zip(self.slots, values):
            if value is None:
                continue
            columns = self.columns[slot.group]
            parts[slot.group].append(value.reshape(-1) if columns is None else value.reshape(-1, columns))
            if padding := self.pieces[slot.group][slot.place] - value.numel():
                parts[slot.group].append(value.new_zeros(padding))
        return tuple(torch.cat(part).reshape(-1) if part else None for part in parts)

    def tree(self, values: Sequence[Any]) -> Tree:
        """The tree from one value a slot."""
        return _tree.unflatten([None if slot is None else values[slot] for slot in self.leaves], self.spec)


_layouts: dict[Any, Layout] = {}


def _intern(*content: Any) -> Layout:
    return _layouts.setdefault(content, Layout(*content))


def _restore(numbers: Tree, *content: Any) -> Layout:
    leaves, spec = _tree.flatten(numbers)
    return _intern(spec, tuple(leaves), *content)


class FlatParams:
    """A pytree of tensors held as one 1-D tensor per group; made by `ravel`, immutable, itself a pytree.

    Its leaves are the groups, so every function of pytrees (the scaler's, an optimizer's, `clip_grad_norm`, a tree_map)
    does per group what it would do per tensor. Copy a state of several FlatParams freely: the layout is shared.
    """

    groups: Groups
    """One tensor a group, shape (size,); None where a tree function was given or made a None, shape () where an
    optimizer keeps one number a tensor (a step count)."""
    layout: Layout
    """Where every tensor lies; the same object for trees of the same layout."""

    def __init__(self, groups: Groups, layout: Layout) -> None:
        self.groups, self.layout = groups, layout

    def __repr__(self) -> str:
        held = ", ".join(f"{label}: {_tree.describe(group)}" for label, group in zip(self.layout.labels, self.groups))
        return f"FlatParams({len(self.layout.slots)} tensors in {{{held}}})"

    def tree(self) -> Tree:
        """The original pytree, its leaves views of the groups; leaves that were one tensor are one view.

        Differentiable: the gradient of a group is one concatenation. No copy, no sync.

        Example:
            >>> ravel({"w": torch.ones(2, 2), "b": torch.zeros(2)}).tree()["b"]
            tensor([0., 0.])
        """
        return self.layout.tree(self.layout.views(self.groups))

    def ravel(self, tree: Tree) -> FlatParams:
        """Lay another tree of the same structure and shapes out as this one is.

        Args:
            tree: a pytree of tensors, of any dtypes and devices, one of each within a group; a None counts as zeros.
                Of tied leaves the first counts.

        Raises:
            TypeError: a leaf is no tensor.
            ValueError: the trees differ in structure, or a leaf in shape.

        Example:
            >>> flat = ravel({"w": torch.ones(2, 2)})
            >>> flat.ravel({"w": torch.full((2, 2), 3.0)}).tree()["w"]
            tensor([[3., 3.],
                    [3., 3.]])
        """
        values = _collect("ravel", self, tree)
        ones: dict[int, Tensor | None] = {}
        for number, slot in enumerate(self.layout.slots):
            if _is_one(self.groups[slot.group]):
                ones.setdefault(slot.group, values[number])
                values[number] = None
        groups = [ones.get(number, group) for number, group in enumerate(self.layout.join(values))]
        return FlatParams(tuple(groups), self.layout)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor under its dotted name, as `torch.nn.Module.state_dict` names it; tied names share one tensor.

        The tensors are copies, contiguous: saving one saves no more than itself.

        Raises:
            ValueError: two leaves have one dotted name.

        Example:
            >>> list(ravel({"layer": {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}}).state_dict())
            ['layer.weight', 'layer.bias']
        """
        copies = [None if view is None else view.clone() for view in self.layout.views(self.groups)]
        names = _tree.names(self.layout.tree(copies))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"state_dict: every leaf must have a dotted name of its own; got {twice!r} twice")
        found = {name: copies[slot] for name, slot in zip(names, self.layout.leaves) if slot is not None}
        return {name: value for name, value in found.items() if value is not None}


_tree.register(
    FlatParams,
    lambda flat: (list(flat.groups), flat.layout),
    lambda groups, layout: FlatParams(tuple(groups), layout),
    "groups",
)


def matrix_or_vector(name: str, leaf: Tensor) -> str:  # noqa: ARG001  what `group` is called with
    """The group "matrix" for tensors of two or more dimensions, "vector" for the rest: who decays, and who does not.

    Pure; no sync.

    Args:
        name: the leaf's dotted name; not used here.
        leaf: the tensor.

    Raises:
        Nothing.

    Example:
        >>> matrix_or_vector("head.bias", torch.zeros(4))
        'vector'
    """
    return "matrix" if leaf.dim() >= 2 else "vector"


def ravel(params: Tree, *, group: Callable[[str, Tensor], str] = matrix_or_vector) -> FlatParams:
    """Lay a pytree of tensors out in a few 1-D ones.

    Tensors of one dtype and device for which `group` returns the same lie together, in the tree's order, each on a
    boundary of 256 bytes; the padding is zero. Matrices whose rows have one length lie in a group of their own, for
    the four lengths with most elements: a compiled step writes their gradients in place. A tensor that stands under
    two names (tied weights) lies there once. Copies the values; no sync.

    Args:
        params: a pytree of dense floating-point or complex tensors; None passes through.
        group: from a leaf's dotted name and the tensor to a label: tensors whose labels differ are kept apart, so that
            they can have hyperparameters of their own (`by_group`). The names of tied leaves must agree.

    Returns:
        A `FlatParams`; `.tree()` is the same pytree of views.

    Raises:
        TypeError: a leaf is an integer or sparse tensor, or neither a tensor nor None.
        ValueError: group differs between two names of one tensor.

    Example:
        >>> flat = ravel({"w": torch.ones(2, 2), "b": torch.zeros(2), "tied": None})
        >>> [tuple(values.shape) for values in flat.groups], flat.layout.labels
        ([(128,), (64,)], ('matrix', 'vector'))
    """
    return arrange("ravel", params, group)


def arrange(
    call: str,
    params: Tree,
    group: Callable[[str, Tensor], str],
    apart: Callable[[str, Tensor], object] = lambda *_: None,
) -> FlatParams:
    """As `ravel`; tensors of one label for which `apart` differs lie in groups of their own."""
    flat, spec = _tree.parameters(call, "params", params)
    first: dict[Any, int] = {}
    leaves: list[int | None] = []
    distinct: list[Tensor] = []
    keys: list[tuple[Any, ...]] = []
    for name, leaf in zip(_tree.names(params), flat):
        if leaf is None:
            leaves.append(None)
            continue
        label = group(name, leaf)
        if not isinstance(label, str):
            raise TypeError(f"{call}: group must return a string; got {label!r} for {name!r}")
        number = first.setdefault(identity(leaf), len(distinct))
        leaves.append(number)
        if number == len(distinct):
            distinct.append(leaf)
            keys.append((label, leaf.dtype, leaf.device, str(apart(name, leaf))))
        elif keys[number][0] != label:
            raise ValueError(
                f"{call}: group must return the same for every name of a tensor; got {keys[number][0]!r} and {label!r} "
                f"for {name!r}"
            )
    rows = _row_lengths(keys, distinct)
    slots: list[Slot] = []
    pieces: dict[Any, list[int]] = {}
    for key, length, leaf in zip(keys, rows, distinct):
        sizes = pieces.setdefault((key, length), [])
        slots.append(Slot(list(pieces).index((key, length)), len(sizes), tuple(leaf.shape)))
        unit = _ALIGNMENT if leaf.dim() > 1 else _ALIGNMENT // 2
        sizes.append(-(-leaf.numel() // unit) * unit)
    labels, columns = tuple(key[0] for key, _ in pieces), tuple(length for _, length in pieces)
    layout = _intern(spec, tuple(leaves), tuple(slots), labels, tuple(map(tuple, pieces.values())), columns)
    return FlatParams(layout.join(distinct), layout)


def _row_lengths(keys: list[tuple[Any, ...]], tensors: list[Tensor]) -> list[int | None]:
    """For every tensor the length of its rows if it is to lie with its like, None if in the group of all the rest.

    A concatenation of matrices along their rows is one that Inductor never performs: each product that makes a weight's
    gradient writes straight into its slice. Of one-dimensional pieces it copies every one.
    """
    sizes: dict[Any, int] = {}
    for key, leaf in zip(keys, tensors):
        if leaf.dim() == 2 and leaf.numel() % _ALIGNMENT == 0 and leaf.numel():
            like = (key, leaf.shape[1])
            sizes[like] = sizes.get(like, 0) + leaf.numel()
    chosen = set(sorted(sizes, key=lambda like: -sizes[like])[:_ROW_LENGTHS])
    aligned = [leaf.dim() == 2 and leaf.numel() % _ALIGNMENT == 0 for leaf in tensors]
    return [
        leaf.shape[1] if fits and (key, leaf.shape[1]) in chosen else None
        for key, leaf, fits in zip(keys, tensors, aligned)
    ]


def _collect(call: str, like: FlatParams, tree: Tree) -> list[Tensor | None]:
    """The values of a tree, one a slot of a FlatParams, checked against its structure and shapes."""
    layout = like.layout
    values, spec = _tree.tensors(call, "tree", tree)
    if spec != layout.spec:
        _tree.same_structure(call, ("the FlatParams' tree", "tree"), (like.tree(), tree))
    found: list[Tensor | None] = [None] * len(layout.slots)
    for index, (number, value) in enumerate(zip(layout.leaves, values)):
        if number is None or value is None or found[number] is not None:
            continue
        slot = layout.slots[number]
        shape = () if _is_one(like.groups[slot.group]) else slot.shape
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{call}: tree{_tree.path_of(tree, index)} must have shape {shape}; got {_tree.describe(value)}"
            )
        found[number] = value
    for number, slot in enumerate(layout.slots):
        group = like.groups[slot.group]
        if found[number] is None and group is not None:
            found[number] = group.new_zeros(() if _is_one(group) else slot.shape)
    return found


def expand(tree: Tree) -> Tree:
    """The tree with every FlatParams in it replaced by its pytree of views."""
    return _tree.map_nodes(FlatParams, lambda node: node.tree(), tree)


def collapse(like: Tree, tree: Tree) -> Tree:
    """The inverse of `expand`: the parts of a tree that stand where `like` has a FlatParams, laid out as it is."""
    return _tree.map_nodes(FlatParams, lambda node, part: node.ravel(part), like, tree)


def identity(leaf: Tensor) -> object:
    """What two names of one tensor share: the object, or place and shape in one storage (as in a state_dict)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(leaf) or not leaf.numel():
        return id(leaf)
    return leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype


def _is_one(group: Tensor | None) -> bool:
    return group is not None and group.dim() == 0


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
