"""What an optimizer of torch's kind keeps between steps, taken out of an instance as tensors and put into another one.

A class keeps it in `self.state[param]`, in its parameter group, and in attributes of `self`: tensors, numbers, and
containers of them. An entry is a tensor among them, or a number that changes from step to step. It has a name: its key,
with the way into a container: `step`, `factors[0]`, `self.total`, or `optimizer:exp_avg` in an optimizer that it wraps.
Everything else is a constant.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.compiled_parts import compiled_members
from funcamp._optim.containers import cloned, leaves_of, mapped
from funcamp._optim.decisions import Decisions
from funcamp._optim.number import Number, as_number

#: The state of one parameter, or what all share, by the names of the entries.
Entries: TypeAlias = dict[str, Tensor]
Kind = Literal["tensor", "bool", "int", "float"]

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
#: The kinds from the narrowest: a number that was an int and becomes a float is a float.
_BY_WIDTH: tuple[Kind, ...] = ("bool", "int", "float", "tensor")
#: Constants that are compared by value.
_COMPARED = (str, type(None), torch.Size, torch.dtype, torch.device, frozenset, enum.Enum)
#: How the names of entries in attributes begin, and of those in `self.state` under a key that is no parameter.
ATTRIBUTE = "self."
STATE = "self.state."
#: How the names of a parameter's entries end that are in a dict which all share, under the parameter or its id. They
#: begin with the dict's name, its dots as slashes: exported names separate an entry and a parameter by a dot.
BY_PARAM = "[param]"
BY_ID = "[id]"


class ClassState(NamedTuple):
    """The state of a class between two steps, as tensors."""

    leaves: list[Entries]
    """For each parameter what the class keeps in `self.state[param]`."""
    shared: Entries
    """What it keeps for all of them, in its parameter group and in attributes."""


class Held(NamedTuple):
    """What an instance holds, as it is."""

    leaves: list[dict[str, Any]]
    """`self.state[param]` of each parameter."""
    shared: dict[str, Any]
    """The parameter group; attributes under names that begin with "self."; `self.state["key"]` as "self.state.key"."""


class Entry(NamedTuple):
    """A place in a form, of what becomes a tensor."""

    name: str
    kind: Kind
    example: Tensor | None
    """A tensor like it, for one that is no number."""


class Form(NamedTuple):
    """How a class stores its state after a step: containers and constants, with an `Entry` for what is a tensor."""

    leaves: list[dict[str, Any]]
    shared: dict[str, Any]
    operations: tuple[object, ...] = ()
    """Those of a first step, in order."""
    is_separable: bool = True
    """Whether nothing that it stores for a parameter depends on another one."""
    later_leaves: tuple[list[dict[str, Any]], ...] = ()
    """For each parameter the other forms that its state has after later steps, if a class adds or removes entries."""

    def stages(self, index: int) -> list[dict[str, Any]]:
        """Return the forms of the state of one parameter: after the first step, and the others."""
        later = self.later_leaves[index] if self.later_leaves else []
        return [self.leaves[index], *later]

    @property
    def stage_count(self) -> int:
        """The largest number of forms that the state of a parameter has."""
        return max(len(self.stages(index)) for index in range(len(self.leaves)))

    def at(self, stage: int) -> Form:
        """Return the form in which the state of each parameter has the form of this number, or its last one."""
        if stage == 0:
            return self
        return self._replace(leaves=[self.stages(index)[: stage + 1][-1] for index in range(len(self.leaves))])

    def leaf_entries(self, index: int) -> dict[str, Entry]:
        """Return the entries of one parameter by name, of all its forms."""
        found: dict[str, Entry] = {}
        for leaf_form in self.stages(index):
            found = entries_in(leaf_form) | found
        return found


class Changing(NamedTuple):
    """The numbers that change from step to step, by their names, and what is new in the group after a step."""

    leaves: dict[str, Kind]
    shared: dict[str, Kind]
    shared_names: frozenset[str]
    """The keys of the group and the attributes that are state: they change, or a step makes them."""
    forms: bool = False
    """Whether a later step adds entries to the state of a parameter, or removes some."""


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


class ChangedConstantError(Exception):
    """A state has not the form that it had after the first step."""

    def __init__(self, name: str, before: object, after: object, *, is_shared: bool = False) -> None:
        if before is MISSING or after is MISSING:
            there = "after a later step" if before is MISSING else "after the first step only"
            text = f"its state must have the same entries after every step; got {name!r} {there}"
        else:
            text = (
                f"its state entry {name!r} must be a tensor or a number after every step, or stay what it is; got "
                f"{after!r} after {before!r}"
            )
        super().__init__(text)
        self.name = name
        self.is_shared = is_shared
        """Whether it is no part of the form yet, of what all parameters share."""
        self.before = before
        self.after = after

    @property
    def is_of_another_form(self) -> bool:
        """Whether the state of one parameter has other entries than before."""
        return not self.is_shared and (self.before is MISSING or self.after is MISSING)


# What an instance holds.


def holders_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return an instance and the optimizers that it wraps, by the prefix of their entries."""
    holders = {"": optimizer}
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            holders[f"{name}:"] = value
    return holders


def held_by(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Held:
    """Return what an instance holds, and the optimizers that it wraps."""
    leaves: list[dict[str, Any]] = [{} for _ in params]
    shared: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, holder in holders_of(optimizer).items():
        group = holder.param_groups[0]
        if id(group) not in seen:
            seen.add(id(group))
            shared |= {f"{prefix}{name}": value for name, value in group.items() if name != "params"}
        if id(holder.state) not in seen:
            seen.add(id(holder.state))
            for param, leaf in zip(params, leaves):
                leaf |= {f"{prefix}{name}": value for name, value in holder.state.get(param, {}).items()}
            # A key that is no parameter.
            no_params = {key: value for key, value in holder.state.items() if not isinstance(key, Tensor)}
            shared |= {f"{prefix}{STATE}{key}": value for key, value in no_params.items()}
    cls: Any = type(optimizer)
    others = _of_every_instance() | compiled_members(cls).keys()
    for name, value in vars(optimizer).items():
        if name not in others and not isinstance(value, torch.optim.Optimizer):
            shared[f"{ATTRIBUTE}{name}"] = value
    _give_to_params(shared, leaves, params)
    return Held(leaves, shared)


def _give_to_params(shared: dict[str, Any], leaves: list[dict[str, Any]], params: list[Tensor]) -> None:
    """Move what dicts hold under a parameter, or under its id, to what is held for this parameter."""
    leaf_of = {id(param): leaf for param, leaf in zip(params, leaves)}
    for name, value in shared.items():
        if not isinstance(value, dict):
            continue
        others: dict[Any, Any] = {}
        leaf_name = name.replace(".", "/")
        for key, item in value.items():
            if isinstance(key, Tensor) and id(key) in leaf_of:
                leaf_of[id(key)][f"{leaf_name}{BY_PARAM}"] = item
            elif type(key) is int and key in leaf_of:
                leaf_of[key][f"{leaf_name}{BY_ID}"] = item
            else:
                others[key] = item
        if len(others) < len(value):
            shared[name] = others


def aliases_in(held: Held, params: list[Tensor]) -> set[frozenset[str]]:
    """Return the names of what an instance holds in one memory, two by two; a parameter is "the parameter"."""
    names_in: dict[int, list[str]] = collections.defaultdict(list)
    named: list[tuple[str, Any]] = [("the parameter", param) for param in params]
    for entries in (*held.leaves, held.shared):
        named += leaves_of(entries).items()
    for name, value in named:
        if isinstance(value, Tensor):
            names_in[id(value.untyped_storage())].append(name)
    return {frozenset(pair) for names in names_in.values() for pair in itertools.combinations(names, 2)}


@functools.cache
def _of_every_instance() -> frozenset[str]:
    """Return the attributes that every optimizer has. Making one imports torch._dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


def snapshot(held: Held) -> Held:
    """Return a copy that later steps do not change."""
    leaves = [{name: cloned(value) for name, value in leaf.items()} for leaf in held.leaves]
    return Held(leaves, {name: cloned(value) for name, value in held.shared.items()})


def kind_of(value: object) -> Kind | None:
    """Return the kind of an entry that a value may be; None for a constant of another kind."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Number):
        return "float"
    return _KINDS.get(type(value))


def wider(one: Kind | None, other: Kind) -> Kind:
    """Return the wider of two kinds."""
    return other if one is None else max(one, other, key=_BY_WIDTH.index)


def same(before: object, after: object) -> bool:
    """Return whether a leaf is as before."""
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
            return False
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        return before.is_meta or after.is_meta or torch.equal(before, after)
    if isinstance(before, Number) or isinstance(after, Number):
        return before is after
    if type(before) is type(after) and type(before) in _KINDS:
        return before == after or (before != before and after != after)
    if type(before) is type(after) and isinstance(before, _COMPARED):
        return bool(before == after)
    if isinstance(before, types.MethodType) and isinstance(after, types.MethodType):
        return before.__func__ is after.__func__
    if isinstance(before, types.FunctionType) and isinstance(after, types.FunctionType):
        return before.__code__ is after.__code__
    return before is after


# Forms.


def form_of(held: Held, first: Held, changing: Changing) -> Form:
    """Return the form of what an instance holds after a first step.

    Args:
        held: what it holds.
        first: what it held before. What the step has changed is part of the form: it may depend on the dtype.
        changing: the numbers that change.
    """

    def marked(kinds: Mapping[str, Kind]) -> Callable[[str, Any], Any]:
        def mark(name: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return Entry(name, "tensor", leaf)
            if isinstance(leaf, Number):
                return Entry(name, kinds.get(name, "float"), None)
            return Entry(name, kinds[name], None) if name in kinds else leaf

        return mark

    leaves = []
    for leaf in held.leaves:
        leaves.append({name: mapped(marked(changing.leaves), value, name) for name, value in leaf.items()})
    shared: dict[str, Any] = {}
    for name, value in held.shared.items():
        if name in changing.shared_names or (
            is_plain(value) and not is_unchanged(first.shared.get(name, MISSING), value)
        ):
            shared[name] = mapped(marked(changing.shared), value, name)
    return Form(leaves, shared)


def is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, tensors and text, which can be compared."""
    leaves = leaves_of({"": value}).values()
    return all(leaf is None or isinstance(leaf, _COMPARED) or kind_of(leaf) is not None for leaf in leaves)


def is_unchanged(before: object, after: object) -> bool:
    """Return whether a value consists of the same leaves as before; tensors are compared by shape if they are meta."""
    leaves, later_leaves = leaves_of({"": before}), leaves_of({"": after})
    return leaves.keys() == later_leaves.keys() and all(same(leaf, later_leaves[name]) for name, leaf in leaves.items())


def entries_in(form: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entries of a form by name."""
    found: dict[str, Entry] = {}

    def note(_: str, leaf: Any) -> None:
        if isinstance(leaf, Entry):
            found[leaf.name] = leaf

    for value in form.values():
        _each(note, value)
    return found


def _each(fn: Callable[[str, Any], None], value: Any) -> None:
    """Call fn on each leaf of a form; an `Entry` is a leaf, though it is a tuple."""
    mapped(fn, value, "")


# From an instance to tensors.


def entries_of(
    held: Mapping[str, Any], form: Mapping[str, Any], like: Tensor, before: Entries, *, is_first: bool
) -> Entries:
    """Return the entries of what an instance holds after a step.

    Args:
        held: what it holds for a parameter, or for all.
        form: the form that it must have.
        like: a tensor on the device of the result.
        before: the entries before the step, whose dtypes numbers keep.
        is_first: whether it is a first step, which may leave an entry to a later one.

    Raises:
        ChangedConstantError: something has changed that is no entry of the form.
    """
    found: Entries = {}
    leaves = leaves_of(held)
    expected = leaves_of(form)
    for name, leaf in expected.items():
        after = leaves.get(name, MISSING)
        if not isinstance(leaf, Entry):
            if after is MISSING or not same(leaf, after):
                raise ChangedConstantError(name, leaf, after)
            continue
        if after is MISSING and is_first:  # as SGD does not set the buffer of a momentum of 0
            if name in before:
                found[name] = before[name]
            continue
        former = before.get(name)
        # Numbers keep their dtype, and so does torch's counter, which is wider inside of a step.
        is_counter = leaf.kind != "tensor" or (name == "step" and former is not None and former.dim() == 0)
        dtype = former.dtype if former is not None and is_counter else None
        tensor = as_tensor(after, leaf.kind, like, dtype)
        is_fraction = leaf.kind in ("int", "bool") and isinstance(after, Number) and not after.is_integral
        if tensor is None or is_fraction:
            raise ChangedConstantError(name, leaf, after)
        found[name] = tensor
    for name in leaves.keys() - expected.keys():
        raise ChangedConstantError(name, MISSING, leaves[name])
    return found


def as_tensor(value: Any, kind: Kind, like: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return an entry as a tensor: a number of shape () on a device; None for what is no number and no tensor."""
    if isinstance(value, Tensor):
        # A number may become a tensor of shape (1,); whoever reads one as a number gets the same.
        tensor = value.reshape(()) if kind != "tensor" and value.numel() == 1 else value
        tensor = tensor.to(like.device) if tensor.dim() == 0 else tensor
        return tensor if dtype is None else tensor.to(dtype)
    dtype = dtype or _dtype(kind, like)
    if isinstance(value, Number):
        return value.tensor.to(like.device, dtype)
    if type(value) in _KINDS:
        return torch.full((), value, dtype=dtype, device=like.device)
    return None


def zero_of(entry: Entry, like: Tensor) -> Tensor:
    """Return a tensor of zeros for an entry."""
    if entry.example is not None:
        return torch.zeros_like(entry.example, device=like.device)
    return torch.zeros((), dtype=_dtype(entry.kind, like), device=like.device)


def _dtype(kind: Kind, like: Tensor) -> torch.dtype:
    dtype = _DTYPES.get(kind, torch.float64)
    return torch.float32 if dtype == torch.float64 and like.device.type == "mps" else dtype


# From tensors to an instance.


def filled(form: Mapping[str, Any], entries: Entries, decisions: Decisions, label: str) -> dict[str, Any]:
    """Return what an instance holds: the form, with tensors and numbers for its entries.

    Args:
        form: of a parameter, or of what all share.
        entries: the tensors; the class writes into them.
        decisions: those of the run.
        label: how errors call what holds them.
    """

    def fill(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Entry):
            return leaf
        value = entries[leaf.name]
        if leaf.kind == "tensor":
            return value
        is_integral = leaf.kind in ("int", "bool")
        return as_number(f"{label} {leaf.name!r}", float("nan"), value, decisions, is_integral=is_integral)

    return {key: mapped(fill, value, key) for key, value in form.items()}
