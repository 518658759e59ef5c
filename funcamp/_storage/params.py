"""Parameters: a pytree of tensors stored in groups, so that functions of it run few kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import full, is_distributed
from funcamp._storage.layout import Groups, Layout, arrange
from funcamp._types import Tree

_FIX = (
    ".tree() is the pytree of its tensors, and step.loss_fn.state_dict(state.params, state.buffers) is what "
    "module.load_state_dict takes"
)


class Params:
    """A pytree of tensors stored in groups; immutable; a pytree, whose leaves are the groups.

    | | a group is |
    |---|---|
    | flat, from `ravel` and `init` | a 1-D tensor, in which tensors of one kind lie one after the other |
    | from `init(flat=False)` | one tensor, in its own shape |
    | sharded, from a step with `DataParallel(shard=True)` | a DTensor, of which this rank stores a part |

    `params["weight"]` is one tensor, a view, as is `params.tree()["weight"]`. Every function of pytrees (the scaler's,
    an optimizer's, `clip_grad_norm`, a tree_map) runs per group instead of per tensor. The layout is shared between
    copies.
    """

    groups: Groups
    """One tensor per group, in flat storage of shape (size,); None for a group of Nones; shape () for one number per
    group, such as an optimizer's step count."""
    layout: Layout
    """The position of every tensor; the same object for trees of the same layout."""

    def __init__(self, groups: Groups, layout: Layout) -> None:
        self.groups = groups
        self.layout = layout

    def __repr__(self) -> str:
        count = len(self.layout.slots)
        if not self.layout.flat:
            return f"Params({count} tensors, each a group)"
        labelled_groups = zip(self.layout.labels, self.groups)
        groups = ", ".join(f"{label}: {_tree.describe(group)}" for label, group in labelled_groups)
        return f"Params({count} tensors in {{{groups}}})"

    def __getitem__(self, key: object) -> Any:
        tree = self.tree()
        try:
            return tree[key]
        except (KeyError, IndexError, TypeError) as error:
            raise type(error)(f"Params: {key!r} must be in .tree(), {_tree.brief(tree)}") from None

    def __iter__(self) -> NoReturn:
        raise TypeError(f"Params: it must not be iterated over: {_FIX}")

    if not TYPE_CHECKING:  # a type checker would otherwise accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"Params has no attribute {name!r}: {_FIX}")

    def tree(self) -> Tree:
        """Return the original pytree, with views of the groups as leaves; tied leaves are one view.

        Differentiable: the gradient of a group is one concatenation. No copy; no sync.

        Example:
            >>> ravel({"w": torch.ones(2, 2), "b": torch.zeros(2)}).tree()["b"]
            tensor([0., 0.])
        """
        self._refuse_shards()
        return self.layout.tree(self.layout.views(self.groups))

    def placeholders(self) -> Tree:
        """Return the original pytree with a tensor in the shape of every leaf, which has no values and no memory."""
        likes: list[Tensor | None] = []
        for slot in self.layout.slots:
            group = self.groups[slot.group]
            if group is None:
                likes.append(None)
                continue
            shape = slot.shape if self.layout.flat else group.shape
            likes.append(torch.empty((), dtype=group.dtype, device=group.device).expand(shape))
        return self.layout.tree(likes)

    def ravel(self, tree: Tree) -> Params:
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
        self._refuse_shards()
        values = _values_by_slot("ravel", self, tree)
        groups_of_one_number: dict[int, Tensor | None] = {}
        for number, slot in enumerate(self.layout.slots):
            if _is_one_number(self.groups[slot.group]):
                groups_of_one_number.setdefault(slot.group, values[number])
                values[number] = None
        joined_groups = self.layout.join(values)
        groups = [groups_of_one_number.get(number, group) for number, group in enumerate(joined_groups)]
        return Params(tuple(groups), self.layout)

    def values(self) -> list[Tensor]:
        """Return the tensors, tied ones once: views of the groups, one per slot of the layout."""
        self._refuse_shards()
        return [value for value in self.layout.views(self.groups) if value is not None]

    def gathered(self, gather: Callable[[Tensor], Tensor] = full) -> Params:
        """Return the full groups: of sharded ones by an all-gather per group, any others as they are.

        gather: returns the full tensor of a group.
        """
        if not self.is_sharded():
            return self
        return Params(tuple([None if group is None else gather(group) for group in self.groups]), self.layout)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor under its dotted name, as `torch.nn.Module.state_dict` does.

        Tied names share a tensor. The tensors are contiguous copies, so that saving one does not save its group.

        Raises:
            ValueError: two leaves have the same dotted name.

        Example:
            >>> list(ravel({"layer": {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}}).state_dict())
            ['layer.weight', 'layer.bias']
        """
        self._refuse_shards()
        copies = [None if view is None else view.clone() for view in self.layout.views(self.groups)]
        tree = self.layout.tree(copies)
        names = _tree.names(tree)
        repeated = repeated_name(names)
        if repeated is not None:
            raise ValueError(f"state_dict: every leaf must have a unique dotted name; got {repeated!r} twice")
        return {name: copy for name, copy in zip(names, _tree.leaves(tree)) if copy is not None}

    def is_sharded(self) -> bool:
        """Return whether ranks store parts of flat groups. Single tensors that are DTensors are the loss's own."""
        return self.layout.flat and any(is_distributed(group) for group in self.groups)

    def _refuse_shards(self) -> None:
        """Raise if this process has only parts of the groups."""
        if self.is_sharded():
            raise TypeError(
                "Params: params must not be sharded over ranks: a rank has a part of every group, so only "
                "torch.optim's elementwise classes take them (not Muon, not Adafactor, none of other packages), and "
                f"distributed.gather_state makes them complete; got {self!r}"
            )


_tree.register(
    Params,
    lambda params: (list(params.groups), params.layout),
    lambda groups, layout: Params(tuple(groups), layout),
    "groups",
)


def expand(tree: Tree) -> Tree:
    """Replace every `Params` node of a tree by its pytree."""
    return _tree.map_nodes(Params, lambda node: node.tree(), tree)


def collapse(like: Tree, tree: Tree) -> Tree:
    """Invert `expand`: store the parts of a tree at which `like` has a `Params` node as that node does."""
    return _tree.map_nodes(Params, lambda node, part: node.ravel(part), like, tree)


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


def ravel(params: Tree, *, group: Callable[[str, Tensor], str] = matrix_or_vector) -> Params:
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
        A `Params`; `.tree()` is the same pytree, of views.

    Raises:
        TypeError: a leaf is an integer or sparse tensor, or neither a tensor nor None.
        ValueError: group returns different labels for two names of one tensor.

    Example:
        >>> flat = ravel({"w": torch.ones(2, 2), "b": torch.zeros(2), "tied": None})
        >>> [tuple(values.shape) for values in flat.groups], flat.layout.labels
        ([(128,), (64,)], ('matrix', 'vector'))
    """
    layout, tensors = arrange("ravel", params, group)
    return Params(layout.join(tensors), layout)


def clone(tree: Tree) -> Tree:
    """Copy every tensor of a pytree, for example to keep a state that a donated step would consume.

    Pure; no sync.

    Args:
        tree: any pytree.

    Returns:
        The same structure, with tensors cloned and detached and other leaves unchanged.

    Raises:
        TypeError: a leaf has a `state_dict`, as a module and an optimizer do, whose tensors would not be copied.

    Example:
        >>> state = {"w": torch.ones(2)}
        >>> clone(state)["w"] is state["w"]
        False
    """
    leaves, spec = _tree.flatten(tree)
    for leaf in leaves:
        if hasattr(leaf, "state_dict"):
            raise TypeError(f"clone: tree must be of tensors; got {_tree.brief_kind(leaf)}: write copy.deepcopy(...)")
    # Tensors of an inference region have no gradient later, outside of it. Dynamo knows no such region.
    with contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else torch.inference_mode(False):
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _tree.unflatten(copies, spec)


def repeated_name(names: Sequence[str]) -> str | None:
    """Return the first name that is there more than once, if there is one."""
    if len(set(names)) == len(names):
        return None
    return next(name for name in names if names.count(name) > 1)


def _values_by_slot(call: str, like: Params, tree: Tree) -> list[Tensor | None]:
    """Return the values of a tree, one per slot of Params; zeros for a slot of which the tree has only None.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: the tree has another structure than that of the Params, or a leaf another shape.
    """
    layout = like.layout
    leaves, spec = _tree.tensors(call, "tree", tree)
    if spec != layout.spec:
        _tree.same_structure(call, ("the Params' tree", "tree"), (like.tree(), tree))
    shapes = [() if _is_one_number(like.groups[slot.group]) else slot.shape for slot in layout.slots]
    values: list[Tensor | None] = [None] * len(layout.slots)
    for index, (number, leaf) in enumerate(zip(layout.leaves, leaves)):
        if number is None or leaf is None:
            continue
        is_later_name = values[number] is not None  # of tied leaves the first counts
        if is_later_name:
            continue
        shape = shapes[number]
        if tuple(leaf.shape) != shape:
            raise ValueError(
                f"{call}: tree{_tree.path_of(tree, index)} must have shape {shape}; got {_tree.describe(leaf)}"
            )
        values[number] = leaf
    for number, slot in enumerate(layout.slots):
        group = like.groups[slot.group]
        if values[number] is None and group is not None:
            values[number] = group.new_zeros(shapes[number])
    return values


def _is_one_number(group: Tensor | None) -> bool:
    """Return whether a group is one number for all its tensors, such as an optimizer's step count."""
    return group is not None and group.dim() == 0
