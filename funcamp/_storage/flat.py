"""Flat storage: a pytree as a few one-dimensional tensors, so that functions of it run few kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._storage.layout import Groups, Layout, arrange
from funcamp._types import Tree

_FIX = (
    ".tree() is the pytree of its tensors, and step.loss_fn.state_dict(state.params, state.buffers) is what "
    "module.load_state_dict takes"
)


class FlatParams(_tree.Stored):
    """A pytree of tensors stored as one 1-D tensor per group; made by `ravel`; immutable; a pytree.

    `flat["weight"]` is one tensor, a view, as is `flat.tree()["weight"]`. Its leaves are the groups, so every function
    of pytrees (the scaler's, an optimizer's, `clip_grad_norm`, a tree_map) runs per group instead of per tensor. The
    layout is shared between copies.
    """

    groups: Groups
    """One tensor per group, shape (size,); None for a group of Nones; shape () for one number per group, such as an
    optimizer's step count."""
    layout: Layout
    """The position of every tensor; the same object for trees of the same layout."""

    def __init__(self, groups: Groups, layout: Layout) -> None:
        self.groups, self.layout = groups, layout

    def __repr__(self) -> str:
        held = ", ".join(f"{label}: {_tree.describe(group)}" for label, group in zip(self.layout.labels, self.groups))
        return f"FlatParams({len(self.layout.slots)} tensors in {{{held}}})"

    def __getitem__(self, key: Any) -> Any:
        tree = self.tree()
        try:
            return tree[key]
        except (KeyError, IndexError, TypeError) as error:
            raise type(error)(f"FlatParams: {key!r} must be in .tree(), {_tree.brief(tree)}") from None

    def __iter__(self) -> NoReturn:
        raise TypeError(f"FlatParams: it must not be iterated over: {_FIX}")

    if not TYPE_CHECKING:  # a type checker would otherwise accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"FlatParams has no attribute {name!r}: {_FIX}")

    def tree(self) -> Tree:
        """Return the original pytree, with views of the groups as leaves; tied leaves are one view.

        Differentiable: the gradient of a group is one concatenation. No copy; no sync.

        Example:
            >>> ravel({"w": torch.ones(2, 2), "b": torch.zeros(2)}).tree()["b"]
            tensor([0., 0.])
        """
        return self.layout.tree(self.layout.views(self.groups))

    def placeholders(self) -> Tree:
        """Return the original pytree with an empty tensor for every leaf."""
        groups = [None if group is None else group.new_empty(0) for group in self.groups]
        return self.layout.tree([groups[slot.group] for slot in self.layout.slots])

    def ravel(self, tree: Tree) -> FlatParams:
        """Lay out another tree of the same structure and shapes like this one.

        Args:
            tree: a pytree of tensors of any dtype and device, the same within a group; None stands for zeros. For tied
                leaves the first counts.

        Raises:
            TypeError: a leaf is not a tensor.
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

    def gathered(self, dtypes: Mapping[int, torch.dtype | None] | None = None) -> FlatParams:  # noqa: ARG002
        """Return the full groups: these, unless they are slices on several ranks (`distributed.shards.Shards`).

        dtypes: of slices, the groups to gather, each in a dtype or in its own for None; by default all in their own.
        """
        return self

    def outline(self) -> FlatParams:
        """Return groups of full size without this rank's values if these are slices, else these."""
        return self

    def cut_like(self, full: FlatParams) -> FlatParams:
        """Return full groups as these are stored: this rank's slices if these are slices, else as they are."""
        return full

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor under its dotted name, as `torch.nn.Module.state_dict` does.

        Tied names share a tensor. The tensors are contiguous copies, so that saving one does not save its group.

        Raises:
            ValueError: two leaves have the same dotted name.

        Example:
            >>> list(ravel({"layer": {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}}).state_dict())
            ['layer.weight', 'layer.bias']
        """
        copies = [None if view is None else view.clone() for view in self.layout.views(self.groups)]
        names = _tree.names(self.layout.tree(copies))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"state_dict: every leaf must have a unique dotted name; got {twice!r} twice")
        found = {name: copies[slot] for name, slot in zip(names, self.layout.leaves) if slot is not None}
        return {name: value for name, value in found.items() if value is not None}


_tree.register(
    FlatParams,
    lambda flat: (list(flat.groups), flat.layout),
    lambda groups, layout: FlatParams(tuple(groups), layout),
    "groups",
)


def is_sharded(params: Tree) -> bool:
    """Return whether a process stores slices of the parameters, not all of them."""
    return isinstance(params, FlatParams) and not params.whole


def matrix_or_vector(name: str, leaf: Tensor) -> str:  # noqa: ARG001  what `group` is called with
    """Return "matrix" for a tensor of two or more dimensions, otherwise "vector".

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
    """Store a pytree of tensors in a few 1-D tensors.

    Tensors with the same dtype, device and `group` label are stored together, in the tree's order. Each starts at a
    multiple of 256 bytes; the padding is zero. Matrices with rows of equal length get a separate group, for the four
    lengths with the most elements, so that a compiled step can write their gradients in place. A tensor with two names
    (tied weights) is stored once. Copies the values; no sync.

    Args:
        params: a pytree of dense floating-point or complex tensors; None passes through.
        group: a function from a leaf's dotted name and the tensor to a label. Tensors with different labels are stored
            separately, so that they can have separate hyperparameters (`by_group`). The names of tied leaves must
            agree.

    Returns:
        A `FlatParams`; `.tree()` is the same pytree, of views.

    Raises:
        TypeError: a leaf is an integer or sparse tensor, or neither a tensor nor None.
        ValueError: group returns different labels for two names of one tensor.

    Example:
        >>> flat = ravel({"w": torch.ones(2, 2), "b": torch.zeros(2), "tied": None})
        >>> [tuple(values.shape) for values in flat.groups], flat.layout.labels
        ([(128,), (64,)], ('matrix', 'vector'))
    """
    layout, tensors = arrange("ravel", params, group)
    return FlatParams(layout.join(tensors), layout)


def _collect(call: str, like: FlatParams, tree: Tree) -> list[Tensor | None]:
    """Return the values of a tree, one per slot of a FlatParams; check its structure and shapes."""
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


def _is_one(group: Tensor | None) -> bool:
    return group is not None and group.dim() == 0
