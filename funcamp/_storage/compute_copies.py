"""Compute copies: which tensors the loss gets in the compute dtype, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import identity, rebind
from funcamp._storage.flat import FlatParams, is_sharded
from funcamp._storage.layout import Layout, arrange
from funcamp._storage.policy import Policy
from funcamp._types import Tree


class KnowsNames(Protocol):
    """What a loss says of its parameters (`_autograd.loss.Loss`)."""

    @property
    def names(self) -> dict[str, str] | None:
        """Each name under which the loss gets a parameter, with the stored name; None if they are the tree's own."""
        ...

    @property
    def cast_names(self) -> frozenset[str] | None:
        """The names that autocast would cast; None if unknown."""
        ...

    @property
    def linear_names(self) -> frozenset[str]:
        """The names of the weights of linear layers."""
        ...

    @property
    def hooked_names(self) -> frozenset[str]:
        """The names of the parameters with a hook."""
        ...

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes that the loss knows, by stored name."""
        ...


class Use(NamedTuple):
    """One leaf of the tree that the loss gets."""

    leaf: int | None
    """The number of the stored tensor: a slot of a FlatParams or a leaf of a plain tree; None for a None."""
    low: bool
    """Whether the loss gets it in the compute dtype."""
    float8: bool = False
    """Whether the loss multiplies by it in float8."""


class Plan(NamedTuple):
    """Which tensors the loss gets, and in which precision, without values."""

    cast: tuple[int, ...]
    """The groups (of a FlatParams) or leaves (of a plain tree) that are cast."""
    dtype: torch.dtype
    uses: tuple[Use, ...]
    names: tuple[str, ...] | None
    """The keys of the dict that the loss gets; None if it gets the parameters' own tree."""


class Copies(NamedTuple):
    """The compute copies of one step: one for every group or leaf that the plan casts."""

    values: tuple[Tensor, ...]
    plan: Plan


def store(
    call: str,
    params: Tree,
    policy: Policy,
    loss_fn: KnowsNames,
    group: Callable[[str, Tensor], str] | None,
    buckets: int = 1,
    *,
    consume: bool = False,
    split: Mapping[str, object] | None = None,
) -> tuple[Tree, Plan]:
    """Return the parameters as the state stores them, flat with a group, and the plan of their copies.

    The result has separate memory; with consume the given tensors get that memory too, instead of their own. Names with
    different values of split are in separate groups.
    """
    aliases = _aliases(loss_fn)
    tree = params.tree() if isinstance(params, FlatParams) else params
    _check_kinds(call, _tree.names(tree), _tree.parameters(call, "params", tree)[0], {})  # before it is consumed

    def uses_of(name: str, leaf: Tensor) -> list[tuple[bool, bool]]:
        return sorted({_use(policy, loss_fn, alias, leaf)[1:] for alias in aliases.get(name, [name])})

    if isinstance(params, FlatParams):
        flat = clone(params)
    elif group is not None:

        def apart(name: str, leaf: Tensor) -> object:
            return leaf.dim() > 1 and uses_of(name, leaf), (split or {}).get(name)

        layout, tensors = arrange(call, params, group, apart, buckets)
        flat = FlatParams(layout.take(tensors) if consume else layout.join(tensors), layout)
    else:
        flat = None
    if flat is None:
        _refuse_ties(call, params)
    stored = flat or (_taken(params) if consume else clone(params))
    return stored, plan_for(call, stored, policy, loss_fn)


def plan_for(call: str, params: Tree, policy: Policy, loss_fn: KnowsNames) -> Plan:
    """Return which stored parameters the policy copies for a loss."""
    stored_as: dict[str, str] | None = loss_fn.names
    aliases = _aliases(loss_fn)
    flat = full_size(params) if isinstance(params, FlatParams) else None
    tree = params if flat is None else flat.tree()
    leaves, _ = _tree.parameters(call, "params", tree)
    names = _tree.names(tree)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{call}: every leaf of params must have a unique dotted name; got {twice!r} twice")
    numbers = list(range(len(leaves))) if flat is None else list(flat.layout.leaves)
    where = {name: (number, leaf) for name, number, leaf in zip(names, numbers, leaves)}
    if stored_as is not None and set(where) != set(aliases):
        odd = sorted(set(where) ^ set(aliases))[0]
        raise ValueError(f"{call}: params must have the names of {loss_fn!r}'s params(); they differ in {odd!r}")
    _check_kinds(call, names, leaves, loss_fn.shapes())
    seen = [(name, stored_as[name]) for name in stored_as] if stored_as is not None else [(n, n) for n in names]
    uses: list[Use] = []
    cast: set[int] = set()
    for name, source in seen:
        number, leaf = where[source]
        use = Use(None, False) if leaf is None else _use(policy, loss_fn, name, leaf, number)
        uses.append(use)
        if use.low and number is not None:
            cast.add(number if flat is None else flat.layout.slots[number].group)
    keys = None if stored_as is None else tuple(stored_as)
    return Plan(tuple(sorted(cast)), policy.compute_dtype, tuple(uses), keys)


def _check_kinds(call: str, names: list[str], leaves: list[Tensor | None], shapes: dict[str, torch.Size]) -> None:
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


def _use(policy: Policy, loss_fn: KnowsNames, name: str, leaf: Tensor, number: int | None = None) -> Use:
    float8 = not policy.no_float8(name, leaf, loss_fn.linear_names)
    return Use(number, not float8 and policy.casts(name, leaf, _cast_names(policy, loss_fn)), float8)


def _cast_names(policy: Policy, loss_fn: KnowsNames) -> frozenset[str] | None:
    """Return the names that autocast would cast, if the loss knows them, without parameters that have a hook.

    A hook gets the gradient in the parameter's own precision, as in torch's loop: there autocast casts in the forward
    pass, and its backward pass casts the gradient back before the hook.
    """
    names: frozenset[str] | None = loss_fn.cast_names
    if names is None or not policy.autocast:
        return names
    return names - frozenset(loss_fn.hooked_names)


def float8_inputs(plan: Plan) -> list[int]:
    """Return the places, among `for_loss`'s inputs, of the weights that multiply in float8."""
    places = _distinct(plan)
    return [places[leaf, False] for leaf in float8_leaves(plan)]


def float8_leaves(plan: Plan) -> list[int]:
    """Return the numbers of the stored tensors that multiply in float8, in the order of `float8_inputs`."""
    return list(dict.fromkeys(use.leaf for use in plan.uses if use.float8 and use.leaf is not None))


def float8_groups(plan: Plan, layout: Layout) -> list[int]:
    """Return the groups of flat storage whose tensors the loss uses in float8 only."""
    found: dict[int, bool] = {}
    for use in plan.uses:
        if use.leaf is not None:
            group = layout.slots[use.leaf].group
            found[group] = found.get(group, True) and use.float8
    return [group for group, only in found.items() if only]


def _aliases(loss_fn: KnowsNames) -> dict[str, list[str]]:
    """Return, for each stored name, the names under which the loss gets the parameter."""
    aliases: dict[str, list[str]] = {}
    for name, source in (loss_fn.names or {}).items():
        aliases.setdefault(source, []).append(name)
    return aliases


def place_of(params: Tree) -> Any:
    """Return a cheap key of all that a plan takes from the parameters: layout or names, and dtypes."""
    flat = isinstance(params, FlatParams)
    leaves: Any = params.groups if flat else _tree.leaves(params)
    dtypes = tuple([None if leaf is None else leaf.dtype for leaf in leaves])
    return params.layout if flat else tuple(params) if isinstance(params, dict) else None, dtypes


def _taken(params: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, leaf in params.items():
        found[name] = leaf.detach().clone()
        rebind(leaf, found[name])
    return found


def _refuse_ties(call: str, params: Tree) -> None:
    first: dict[object, str] = {}
    for name, leaf in zip(_tree.names(params), _tree.leaves(params)):
        if leaf is not None:
            other = first.setdefault(identity(leaf), name)
            if other != name:
                raise ValueError(
                    f"{call}: params must not hold one tensor twice with flat=False, as only flat storage keeps "
                    f"it one; got {other!r} and {name!r}"
                )


def cast(params: Tree, plan: Plan) -> tuple[Tree, Copies]:
    """Return full parameters and their compute copies; with shards by one all-gather per large group."""
    if is_sharded(params):
        return _gathered(params, plan)
    sources: Any = params.groups if isinstance(params, FlatParams) else _tree.leaves(params)
    return params, Copies(tuple([sources[number].to(plan.dtype) for number in plan.cast]), plan)


def _gathered(params: Any, plan: Plan) -> tuple[Tree, Copies]:
    """Return full parameters and copies of sharded ones, each group sent in the precision in which it is used."""
    slots = params.layout.slots
    # The dtype in which a group is sent: None, its own, if any use of it reads full precision.
    dtypes: dict[int, torch.dtype | None] = {}
    for use in plan.uses:
        if use.leaf is not None and not use.low:
            dtypes[slots[use.leaf].group] = None
    for number in plan.cast:
        dtypes.setdefault(number, plan.dtype)
    # By themselves: a trace drops what nothing reads besides products in float8.
    separate = {number: dtypes.pop(number) for number in float8_groups(plan, params.layout)}
    both = zip(params.gathered(dtypes).groups, params.gathered(separate).groups)
    values = [other if one is None else one for one, other in both]
    low = [value.to(plan.dtype) for value in (values[number] for number in plan.cast) if value is not None]
    return FlatParams(tuple(values), params.layout), Copies(tuple(low), plan)


def full_size(params: Tree) -> Tree:
    """Return a tree of the parameters' full shapes if they are sharded, else the parameters."""
    return params.outline() if is_sharded(params) else params


def for_loss(params: Tree, copies: Copies) -> tuple[list[Tensor], Callable[[list[Tensor]], Tree]]:
    """Return the distinct inputs of the gradient, and a function that builds the loss's tree of them."""
    plan = copies.plan
    stored = _tree.leaves(params)
    kept: list[Tensor | None] = [None] * len(stored)
    for number, value in zip(plan.cast, copies.values):
        kept[number] = value
    places = _distinct(plan)
    if isinstance(params, FlatParams):
        views = params.layout.views
        stored = views(params.groups, {number for number, low in places if not low})
        kept = views(tuple(kept), {number for number, low in places if low})
    inputs: list[Any] = []
    for number, low in places:
        inputs.append(kept[number] if low else stored[number])

    def build(values: list[Tensor]) -> Tree:
        seen = [None if use.leaf is None else values[places[use.leaf, use.low]] for use in plan.uses]
        if plan.names is not None:
            return dict(zip(plan.names, seen))
        spec = params.layout.spec if isinstance(params, FlatParams) else _tree.flatten(params)[1]
        return _tree.unflatten(seen, spec)

    return inputs, build


def gather(params: Tree, copies: Copies, grads: list[Tensor]) -> Tree:
    """Return gradients of `for_loss`'s inputs as a tree like the parameters; sum those of one tensor."""
    flat = isinstance(params, FlatParams)
    by_leaf: list[Tensor | None] = [None] * (len(params.layout.slots) if flat else len(_tree.leaves(params)))
    for (number, _), grad in zip(_distinct(copies.plan), grads):
        if grad.layout != torch.strided:
            raise TypeError(
                f"step: gradients must be dense (sparse=False in an embedding); got layout {grad.layout} for a "
                f"parameter of shape {tuple(grad.shape)}"
            )
        known = by_leaf[number]
        by_leaf[number] = grad if known is None else known + grad
    if flat:
        return FlatParams(params.layout.join(by_leaf), params.layout)
    return _tree.unflatten(by_leaf, _tree.flatten(params)[1])


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
    flat, spec = _tree.flatten(tree)
    return _tree.unflatten([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)


def _distinct(plan: Plan) -> dict[tuple[int, bool], int]:
    places: dict[tuple[int, bool], int] = {}
    for use in plan.uses:
        if use.leaf is not None and (use.leaf, use.low) not in places:
            places[use.leaf, use.low] = len(places)
    return places
