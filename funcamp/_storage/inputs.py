"""The tensors that a loss gets: each a parameter, as it is stored or cast to the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._storage.layout import Groups, Layout, arrange
from funcamp._storage.params import Params, clone, repeated_name
from funcamp._storage.policy import Policy
from funcamp._types import Tree


class KnowsNames(Protocol):
    """What a loss knows of its parameters (`_autograd.loss.Loss`)."""

    @property
    def names(self) -> dict[str, str] | None:
        """Each name under which the loss gets a parameter, with the stored name; None if they are the tree's own."""
        ...

    @property
    def cast_names(self) -> frozenset[str] | None:
        """The names that autocast would cast; None if unknown."""
        ...

    @property
    def hooked_names(self) -> frozenset[str]:
        """The names of the parameters with a hook."""
        ...

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes that the loss knows, by stored name."""
        ...


class Input(NamedTuple):
    """A tensor that the loss gets, and with respect to which it is differentiated."""

    slot: int
    """The number of the parameter in the layout."""
    is_cast: bool
    """Whether it is in the compute dtype; else as it is stored."""


class Cast(NamedTuple):
    """The groups of parameters as a step reads them."""

    groups: Groups
    """Full groups in the dtype in which they are stored; None for one that is read in the compute dtype only."""
    casts: Groups
    """Groups in the compute dtype; None for one that is not cast."""


class Inputs:
    """What a loss gets of the parameters, in which precision, without values.

    Made once for a layout. A step casts whole groups (`cast`), the loss gets views of them (`values`) as a tree
    (`tree`), and the gradients with respect to these go back into groups (`gradients`).
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, names: tuple[str, ...] | None, leaves: Sequence[Input | None]
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.names = names
        """The keys of the dict that the loss gets; None if it gets the parameters' own tree."""
        number_of_input: dict[Input, int] = {}
        input_of_leaf: list[int | None] = []
        for leaf in leaves:
            if leaf is None:
                input_of_leaf.append(None)
                continue
            number = number_of_input.setdefault(leaf, len(number_of_input))
            input_of_leaf.append(number)
        self.distinct = tuple(number_of_input)
        """The inputs of the loss; a parameter with two names is one, unless they differ in precision."""
        self.input_of_leaf = tuple(input_of_leaf)
        """For every leaf of the tree that the loss gets the number of its input."""
        self.cast_groups = frozenset([self._group_of(loss_input) for loss_input in self.distinct if loss_input.is_cast])
        """The groups that are cast."""

    def _group_of(self, loss_input: Input) -> int:
        """Return the number of the group in which an input is stored."""
        return self.layout.slots[loss_input.slot].group

    def cast(self, params: Params) -> Cast:
        """Return full groups and their casts: the work that a step does once; of slices by all-gathers."""
        groups = params.groups if params.ranks is None else self._gathered(params)
        casts: list[Tensor | None] = [None] * len(groups)
        for number in sorted(self.cast_groups):
            group = groups[number]
            if group is not None:
                casts[number] = group.to(self.dtype)
        return Cast(groups, tuple(casts))

    def values(self, cast: Cast) -> list[Tensor]:
        """Return the values of the inputs: views of the groups and of their casts."""
        cast_slots = {slot for slot, is_cast in self.distinct if is_cast}
        uncast_slots = {slot for slot, is_cast in self.distinct if not is_cast}
        views_of_groups = self.layout.views(cast.groups, uncast_slots)
        views_of_casts = self.layout.views(cast.casts, cast_slots)
        values = [views_of_casts[slot] if is_cast else views_of_groups[slot] for slot, is_cast in self.distinct]
        return [value for value in values if value is not None]

    def _gathered(self, params: Params) -> Groups:
        """Return full groups, each sent in the precision in which it is used."""
        # The dtype in which a group is sent: None, its own, if any use of it reads full precision.
        dtypes: dict[int, torch.dtype | None] = {}
        for loss_input in self.distinct:
            if not loss_input.is_cast:
                dtypes[self._group_of(loss_input)] = None
        for number in sorted(self.cast_groups):
            dtypes.setdefault(number, self.dtype)
        return params.gathered(dtypes).groups

    def tree(self, values: Sequence[Tensor]) -> Tree:
        """Return the tree that the loss gets, of the values of the inputs."""
        leaves = [None if number is None else values[number] for number in self.input_of_leaf]
        if self.names is not None:
            return dict(zip(self.names, leaves))
        return _tree.unflatten(leaves, self.layout.spec)

    def gradients(self, gradients: Sequence[Tensor]) -> Params:
        """Return the gradients with respect to the inputs as parameters are stored; sum those of one parameter."""
        sums: list[Tensor | None] = [None] * len(self.layout.slots)
        for loss_input, gradient in zip(self.distinct, gradients):
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"step: gradients must be dense (sparse=False in an embedding); got layout {gradient.layout} for "
                    f"a parameter of shape {tuple(gradient.shape)}"
                )
            # A tied parameter is two inputs if its names differ in precision.
            sum_before = sums[loss_input.slot]
            sums[loss_input.slot] = gradient if sum_before is None else sum_before + gradient
        return Params(self.layout.join(sums), self.layout)


def lay_out(
    call: str,
    params: Tree,
    policy: Policy,
    loss_fn: KnowsNames,
    group: Callable[[str, Tensor], str],
    *,
    flat: bool = True,
    buckets: int = 1,
    consume: bool = False,
    split: Mapping[str, object] | None = None,
) -> Params:
    """Return the parameters as a state stores them, in separate memory.

    Args:
        call: the public function, for errors.
        params: a pytree of tensors, or `Params`, which keep their layout.
        policy: what is read in which precision. Flat storage puts matrices that the loss reads in different precisions
            into separate groups.
        loss_fn: the loss that gets them.
        group: the label of a leaf, as in `ravel`.
        flat: whether a group is a one-dimensional tensor.
        buckets: the number of consecutive parts of flat storage.
        consume: whether the given tensors get the state's memory too, instead of separate memory.
        split: values by name; flat storage puts names with different ones into separate groups.

    Raises:
        TypeError: a parameter is in float16.
    """
    tree = params.tree() if isinstance(params, Params) else params
    leaves, _ = _tree.parameters(call, "params", tree)
    _check_dtypes_and_shapes(call, _tree.names(tree), leaves, {})  # before they are consumed
    if isinstance(params, Params):
        copy: Params = clone(params)
        return copy
    aliases = _aliases(loss_fn)

    def apart(name: str, leaf: Tensor) -> object:
        precisions = {_is_cast(policy, loss_fn, alias, leaf) for alias in aliases.get(name, [name])}
        return leaf.dim() > 1 and sorted(precisions), (split or {}).get(name)

    layout, tensors = arrange(call, params, group, apart, buckets, flat=flat)
    if consume:
        return Params(layout.take(tensors), layout)
    # A flat group is a copy by itself; a group that is one tensor is that tensor.
    return Params(layout.join(tensors if flat else clone(tensors)), layout)


def inputs_of(call: str, params: Params, policy: Policy, loss_fn: KnowsNames) -> Inputs:
    """Return what a loss gets of stored parameters under a policy.

    Raises:
        ValueError: the parameters have other names or shapes than the loss knows, or one name twice.
        TypeError: a parameter is in float16.
    """
    layout = params.layout
    tree = params.outline().tree()  # shapes and dtypes only: sharded parameters have no full values here
    leaves, _ = _tree.parameters(call, "params", tree)
    names = _tree.names(tree)
    repeated = repeated_name(names)
    if repeated is not None:
        raise ValueError(f"{call}: every leaf of params must have a unique dotted name; got {repeated!r} twice")
    stored_names: dict[str, str] | None = loss_fn.names
    if stored_names is not None and set(names) != set(stored_names.values()):
        differing_names = set(names) ^ set(stored_names.values())
        raise ValueError(
            f"{call}: params must have the names of {loss_fn!r}'s params(); they differ in {min(differing_names)!r}"
        )
    _check_dtypes_and_shapes(call, names, leaves, loss_fn.shapes())
    slots_by_name = dict(zip(names, layout.leaves))
    leaves_by_name = dict(zip(names, leaves))
    # A loss without names gets the tree as it is stored.
    names_to_stored = stored_names or {name: name for name in names}
    leaves_of_loss: list[Input | None] = []
    for name, stored_name in names_to_stored.items():
        slot = slots_by_name[stored_name]
        leaf = leaves_by_name[stored_name]
        if slot is None or leaf is None:
            leaves_of_loss.append(None)
        else:
            leaves_of_loss.append(Input(slot, _is_cast(policy, loss_fn, name, leaf)))
    keys = None if stored_names is None else tuple(stored_names)
    return Inputs(layout, policy.compute_dtype, keys, leaves_of_loss)


def _is_cast(policy: Policy, loss_fn: KnowsNames, name: str, leaf: Tensor) -> bool:
    """Return whether the loss gets a parameter in the compute dtype under one of its names."""
    return policy.casts(name, leaf, _cast_names(policy, loss_fn))


def _cast_names(policy: Policy, loss_fn: KnowsNames) -> frozenset[str] | None:
    """Return the names that autocast would cast, if the loss knows them, without parameters that have a hook.

    A hook gets the gradient in the parameter's own precision, as in torch's loop: there autocast casts in the forward
    pass, and its backward pass casts the gradient back before the hook.
    """
    names: frozenset[str] | None = loss_fn.cast_names
    if names is None or not policy.autocast:
        return names
    return names - frozenset(loss_fn.hooked_names)


def _aliases(loss_fn: KnowsNames) -> dict[str, list[str]]:
    """Return, for each stored name, the names under which the loss gets the parameter."""
    aliases: dict[str, list[str]] = {}
    for name, stored_name in (loss_fn.names or {}).items():
        aliases.setdefault(stored_name, []).append(name)
    return aliases


def _check_dtypes_and_shapes(
    call: str, names: list[str], leaves: list[Tensor | None], shapes: dict[str, torch.Size]
) -> None:
    """Raise if a parameter is float16, as torch's scaler does, or has another shape than the module's."""
    for name, leaf in zip(names, leaves):
        if leaf is None:
            continue
        if leaf.dtype in (torch.float16, torch.complex32):
            raise TypeError(
                f"{call}: params[{name!r}] must not be float16, which rounds most updates of a step to nothing; got "
                f"{_tree.describe(leaf)}: keep it in float32, model.float() (the policy casts for each step), or "
                "freeze it"
            )
        if shapes.get(name, leaf.shape) != leaf.shape:
            raise ValueError(
                f"{call}: params[{name!r}] must have the shape of the module's, {tuple(shapes[name])}; got "
                f"{tuple(leaf.shape)}"
            )
