"""Parameters: a pytree of tensors stored in groups, so that functions of it run few kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._storage.layout import Groups, Layout, arrange
from funcamp._types import Tree

_FIX = (
    ".tree() is the pytree of its tensors, and step.loss_fn.state_dict(state.params, state.buffers) is what "
    "module.load_state_dict takes"
)


class Ranks(Protocol):
    """The ranks that each store one slice of every group: `distributed.collectives.Ranks`."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    def gather(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the slices of all ranks, one after the other, by as few all-gathers as possible."""
        ...

    def cut(self, group: Tensor) -> Tensor:
        """Return this rank's slice of a group that every rank has in full, in memory of its own."""
        ...


class Params:
    """A pytree of tensors stored in groups; immutable; a pytree, whose leaves are the groups.

    | | a group is |
    |---|---|
    | flat, from `ravel` and `init` | a 1-D tensor, in which tensors of one kind lie one after the other |
    | from `init(flat=False)` | one tensor, in its own shape |
    | sharded, from a step with `DataParallel(shard=True)` | this rank's slice of such a 1-D tensor |

    `params["weight"]` is one tensor, a view, as is `params.tree()["weight"]`. Every function of pytrees (the scaler's,
    an optimizer's, `clip_grad_norm`, a tree_map) runs per group instead of per tensor. The layout is shared between
    copies. `FlatParams` is another name of this class.
    """

    groups: Groups
    """One tensor per group, in flat storage of shape (size,); None for a group of Nones; shape () for one number per
    group, such as an optimizer's step count."""
    layout: Layout
    """The position of every tensor; the same object for trees of the same layout."""
    ranks: Ranks | None
    """The ranks that store the other slices; None if this process has the whole groups."""

    def __init__(self, groups: Groups, layout: Layout, ranks: Ranks | None = None) -> None:
        self.groups, self.layout, self.ranks = groups, layout, ranks

    def __repr__(self) -> str:
        count = len(self.layout.slots)
        if not self.layout.flat:
            return f"Params({count} tensors, each a group)"
        parts = ", ".join(f"{label}: {_tree.describe(group)}" for label, group in zip(self.layout.labels, self.groups))
        whose = "" if self.ranks is None else f"rank {self.ranks.rank} of {self.ranks.size} of "
        return f"{whose}Params({count} tensors in {{{parts}}})"

    def __getitem__(self, key: Any) -> Any:
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
        self._refuse_slices()
        return self.layout.tree(self.layout.views(self.groups))

    def placeholders(self) -> Tree:
        """Return the original pytree with an empty tensor for every leaf."""
        groups = [None if group is None else group.new_empty(0) for group in self.groups]
        return self.layout.tree([groups[slot.group] for slot in self.layout.slots])

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
        self._refuse_slices()
        values = _collect("ravel", self, tree)
        ones: dict[int, Tensor | None] = {}
        for number, slot in enumerate(self.layout.slots):
            if _is_one(self.groups[slot.group]):
                ones.setdefault(slot.group, values[number])
                values[number] = None
        groups = [ones.get(number, group) for number, group in enumerate(self.layout.join(values))]
        return Params(tuple(groups), self.layout)

    def gathered(self, dtypes: Mapping[int, torch.dtype | None] | None = None) -> Params:
        """Return the full groups: these, unless they are slices; then by one all-gather per large group.

        dtypes: of slices, the groups to gather, each in a dtype or in its own for None; by default all in their own.
        The others are None in the result.
        """
        if self.ranks is None:
            return self
        groups: list[Tensor | None] = [None] * len(self.groups)
        sent: dict[int, Tensor] = {}
        for number, group in enumerate(self.groups):
            if group is not None and not group.dim():  # a number per group is the same on every rank
                groups[number] = group
            elif group is not None and (dtypes is None or number in dtypes):
                dtype = None if dtypes is None else dtypes[number]
                sent[number] = group if dtype is None else group.to(dtype)
        for number, value in zip(sent, self.ranks.gather(list(sent.values()))):
            groups[number] = value[: sum(self.layout.pieces[number])]
        return Params(tuple(groups), self.layout)

    def outline(self) -> Params:
        """Return groups of full size that store one zero each if these are slices, else these."""
        if self.ranks is None:
            return self
        groups = [
            group if group is None or not group.dim() else group.new_zeros(()).expand(sum(sizes))
            for group, sizes in zip(self.groups, self.layout.pieces)
        ]
        return Params(tuple(groups), self.layout)

    def cut_like(self, full: Params) -> Params:
        """Return full groups as these are stored: this rank's slices if these are slices, else as they are."""
        return full if self.ranks is None else cut(full, self.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor under its dotted name, as `torch.nn.Module.state_dict` does.

        Tied names share a tensor. The tensors are contiguous copies, so that saving one does not save its group.

        Raises:
            ValueError: two leaves have the same dotted name.

        Example:
            >>> list(ravel({"layer": {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}}).state_dict())
            ['layer.weight', 'layer.bias']
        """
        self._refuse_slices()
        copies = [None if view is None else view.clone() for view in self.layout.views(self.groups)]
        names = _tree.names(self.layout.tree(copies))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"state_dict: every leaf must have a unique dotted name; got {twice!r} twice")
        found = {name: copies[slot] for name, slot in zip(names, self.layout.leaves) if slot is not None}
        return {name: value for name, value in found.items() if value is not None}

    def _refuse_slices(self) -> None:
        """Raise if this process has only slices."""
        if self.ranks is not None:
            raise TypeError(
                "Params: params must not be sharded over ranks: a rank has a slice of every group, so only an "
                "elementwise optimizer takes them (not Muon, not Adafactor), and distributed.gather_state makes them "
                f"complete; got {self!r}"
            )


_tree.register(
    Params,
    lambda params: (list(params.groups), (params.layout, params.ranks)),
    lambda groups, context: Params(tuple(groups), *context),
    "groups",
)


def cut(params: Params, ranks: Ranks) -> Params:
    """Return this rank's slices of groups that every rank has in full; no collective."""
    groups: list[Tensor | None] = []
    for group in params.groups:
        if group is None or not group.dim():  # a number per group (a step count) is the same on every rank
            groups.append(group)
        else:
            groups.append(ranks.cut(group))
    return Params(tuple(groups), params.layout, ranks)


def expand(tree: Tree) -> Tree:
    """Replace every `Params` node of a tree by its pytree."""
    return _tree.map_nodes(Params, lambda node: node.tree(), tree)


def collapse(like: Tree, tree: Tree) -> Tree:
    """Invert `expand`: store the parts of a tree at which `like` has a `Params` node as that node does."""
    return _tree.map_nodes(Params, lambda node, part: node.ravel(part), like, tree)


def check_whole(call: str, name: str, tree: Tree) -> None:
    """Raise TypeError if a tree is one rank's slices, because a result for them is not the result for all."""
    if isinstance(tree, Params) and tree.ranks is not None:
        raise TypeError(f"{call}: {name} must not be sharded over ranks; got {tree!r}")


def stored(call: str, params: Tree, group: Callable[[str, Tensor], str]) -> Params:
    """Return a plain tree as Params, tensor by tensor, without a copy."""
    layout, tensors = arrange(call, params, group, flat=False)
    return Params(layout.join(tensors), layout)


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
        Nothing.

    Example:
        >>> state = {"w": torch.ones(2)}
        >>> clone(state)["w"] is state["w"]
        False
    """
    leaves, spec = _tree.flatten(tree)
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _tree.unflatten(copies, spec)


def _collect(call: str, like: Params, tree: Tree) -> list[Tensor | None]:
    """Return the values of a tree, one per slot of Params; check its structure and shapes."""
    layout = like.layout
    values, spec = _tree.tensors(call, "tree", tree)
    if spec != layout.spec:
        _tree.same_structure(call, ("the Params' tree", "tree"), (like.tree(), tree))
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
