"""The state of a class as tensors with names, taken out of an instance and put into another one.

An *entry* is a tensor among what an instance keeps (`instance_state.py`), or a number that changes from step to step,
which becomes a tensor of shape (). Everything else is a constant. A `Form` is what an instance keeps with an `Entry` in
place of each of these: `form_of` makes it, `entries_of` takes the tensors out after a step, and `filled` puts tensors
in before the next one, with a `Number` for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.containers import leaves_of, mapped
from funcamp._optim.decisions import Decisions
from funcamp._optim.instance_state import MISSING, Contents, InstanceState, Kind, is_plain, is_unchanged, kind_of, same
from funcamp._optim.number import Number, as_number

#: The state of one parameter, or what all share, by the names of the entries.
Entries: TypeAlias = dict[str, Tensor]

_DTYPES: dict[Kind, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


class ClassState(NamedTuple):
    """The state of a class between two steps, as tensors."""

    per_param: list[Entries]
    """For each parameter what the class keeps in `self.state[param]`."""
    shared: Entries
    """What it keeps for all of them, in its parameter group and in attributes."""


class Entry(NamedTuple):
    """Stands in a form for what becomes a tensor."""

    name: str
    kind: Kind
    example: Tensor | None
    """A tensor like it; None for a number."""


class Form(NamedTuple):
    """How a class stores its state after a step: containers and constants, with an `Entry` for what is a tensor."""

    per_param: list[Contents]
    shared: Contents
    operations: tuple[object, ...] = ()
    """Those of a first step, in order."""
    is_separable: bool = True
    """Whether nothing that it stores for a parameter depends on another one."""
    later_forms: tuple[list[Contents], ...] = ()
    """For each parameter the other forms that its state has after later steps, if a class adds or removes entries."""

    def stages(self, index: int) -> list[Contents]:
        """Return the forms of the state of one parameter: after the first step, and the others."""
        later = self.later_forms[index] if self.later_forms else []
        return [self.per_param[index], *later]

    @property
    def stage_count(self) -> int:
        """The largest number of forms that the state of a parameter has."""
        return max(len(self.stages(index)) for index in range(len(self.per_param)))

    def at(self, stage: int) -> Form:
        """Return the form in which the state of each parameter has the form of this number, or its last one."""
        if stage == 0:
            return self
        return self._replace(per_param=[self.stages(index)[: stage + 1][-1] for index in range(len(self.per_param))])

    def param_entries(self, index: int) -> dict[str, Entry]:
        """Return the entries of one parameter by name, of all its forms."""
        entries: dict[str, Entry] = {}
        for form in self.stages(index):
            entries = entries_in(form) | entries
        return entries


class Changing(NamedTuple):
    """The numbers that change from step to step, by their names, and what is new in the group after a step."""

    per_param: dict[str, Kind]
    shared: dict[str, Kind]
    shared_names: frozenset[str]
    """The keys of the group and the attributes that are state: they change, or a step makes them."""
    form_changes: bool = False
    """Whether a later step adds entries to the state of a parameter, or removes some."""


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
        """Whether all parameters share it, and the form has no entry for it yet."""
        self.before = before
        self.after = after

    @property
    def is_of_another_form(self) -> bool:
        """Whether the state of one parameter has other entries than before."""
        return not self.is_shared and (self.before is MISSING or self.after is MISSING)


# Forms.


def form_of(state: InstanceState, first_values: InstanceState, changing: Changing) -> Form:
    """Return the form of what an instance keeps after a first step.

    Args:
        state: what it keeps.
        first_values: what it kept before. What the step has changed is part of the form: it may depend on the dtype.
        changing: the numbers that change.
    """

    def with_entries(kinds: Mapping[str, Kind]) -> Callable[[str, object], object]:
        def entry_or_constant(name: str, leaf: object) -> object:
            if isinstance(leaf, Tensor):
                return Entry(name, "tensor", leaf)
            if isinstance(leaf, Number):
                return Entry(name, kinds.get(name, "float"), None)
            return Entry(name, kinds[name], None) if name in kinds else leaf

        return entry_or_constant

    per_param: list[Contents] = []
    for contents in state.per_param:
        replace_leaf = with_entries(changing.per_param)
        per_param.append({name: mapped(replace_leaf, value, name) for name, value in contents.items()})
    shared: Contents = {}
    for name, value in state.shared.items():
        if name in changing.shared_names or _is_set_by_step(first_values.shared.get(name, MISSING), value):
            shared[name] = mapped(with_entries(changing.shared), value, name)
    return Form(per_param, shared)


def _is_set_by_step(before: object, after: object) -> bool:
    return is_plain(after) and not is_unchanged(before, after)


def entries_in(form: Mapping[str, object]) -> dict[str, Entry]:
    """Return the entries of a form by name."""
    return {leaf.name: leaf for leaf in leaves_of(form).values() if isinstance(leaf, Entry)}


# From an instance to tensors.


def entries_of(
    contents: Mapping[str, object], form: Mapping[str, object], like: Tensor, before: Entries, *, is_first: bool
) -> Entries:
    """Return the entries of what an instance keeps after a step.

    Args:
        contents: what it keeps for a parameter, or for all.
        form: the form that it must have.
        like: a tensor on the device of the result.
        before: the entries before the step, whose dtypes numbers keep.
        is_first: whether it is a first step, which may leave an entry to a later one.

    Raises:
        ChangedConstantError: something has changed that is no entry of the form.
    """
    entries: Entries = {}
    leaves = leaves_of(contents)
    expected_leaves = leaves_of(form)
    for name, expected in expected_leaves.items():
        leaf = leaves.get(name, MISSING)
        if not isinstance(expected, Entry):
            if leaf is MISSING or not same(expected, leaf):
                raise ChangedConstantError(name, expected, leaf)
        elif leaf is MISSING and is_first:
            # SGD does not set the buffer of a momentum of 0.
            if name in before:
                entries[name] = before[name]
        else:
            entries[name] = _entry_tensor(name, expected, leaf, like, before.get(name))
    for name in leaves.keys() - expected_leaves.keys():
        raise ChangedConstantError(name, MISSING, leaves[name])
    return entries


def _entry_tensor(name: str, entry: Entry, leaf: object, like: Tensor, before: Tensor | None) -> Tensor:
    """Return an entry after a step; `before` is its tensor before the step.

    Raises:
        ChangedConstantError: it is no tensor and no number any more, or a whole number has become a fraction.
    """
    # Numbers keep their dtype, and so does torch's counter, which is wider inside of a step.
    is_counter = name == "step" and before is not None and before.dim() == 0
    keeps_dtype = entry.kind != "tensor" or is_counter
    dtype = before.dtype if before is not None and keeps_dtype else None
    tensor = as_tensor(leaf, entry.kind, like, dtype)
    is_fraction = entry.kind in ("int", "bool") and isinstance(leaf, Number) and not leaf.is_integral
    if tensor is None or is_fraction:
        raise ChangedConstantError(name, entry, leaf)
    return tensor


def as_tensor(value: object, kind: Kind, like: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return an entry as a tensor: a number of shape () on a device; None for what is no number and no tensor."""
    if isinstance(value, Tensor):
        # A number may become a tensor of shape (1,); code that reads one as a number gets the same.
        tensor = value.reshape(()) if kind != "tensor" and value.numel() == 1 else value
        tensor = tensor.to(like.device) if tensor.dim() == 0 else tensor
        return tensor if dtype is None else tensor.to(dtype)
    dtype = dtype or _dtype(kind, like)
    if isinstance(value, Number):
        return value.tensor.to(like.device, dtype)
    if isinstance(value, (bool, int, float)) and kind_of(value) is not None:  # not of a subclass, such as numpy's
        return torch.full((), value, dtype=dtype, device=like.device)
    return None


def zero_of(entry: Entry, like: Tensor) -> Tensor:
    """Return a tensor of zeros for an entry."""
    if entry.example is not None:
        return torch.zeros_like(entry.example, device=like.device)
    return torch.zeros((), dtype=_dtype(entry.kind, like), device=like.device)


def zeros_of(entries: Mapping[str, Entry], like: Tensor) -> Entries:
    """Return tensors of zeros for entries."""
    return {name: zero_of(entry, like) for name, entry in entries.items()}


def zero_state(form: Form, params: list[Tensor]) -> ClassState:
    """Return a state of zeros that parameters may have after a step."""
    per_param = [zeros_of(form.param_entries(index), param) for index, param in enumerate(params)]
    return ClassState(per_param, zeros_of(entries_in(form.shared), params[0]))


def _dtype(kind: Kind, like: Tensor) -> torch.dtype:
    dtype = _DTYPES.get(kind, torch.float64)
    return torch.float32 if dtype == torch.float64 and like.device.type == "mps" else dtype


# From tensors to an instance.


def filled(form: Mapping[str, object], entries: Entries, decisions: Decisions, label: str) -> Contents:
    """Return what an instance keeps: the form, with tensors and numbers for its entries.

    Args:
        form: of a parameter, or of what all share.
        entries: the tensors; the class writes into them.
        decisions: those of the run.
        label: how errors call what keeps them.
    """

    def value_of(_: str, leaf: object) -> object:
        if not isinstance(leaf, Entry):
            return leaf
        tensor = entries[leaf.name]
        if leaf.kind == "tensor":
            return tensor
        is_integral = leaf.kind in ("int", "bool")
        example = decisions.unknown_example
        return as_number(f"{label} {leaf.name!r}", example, tensor, decisions, is_integral=is_integral)

    return {key: mapped(value_of, value, key) for key, value in form.items()}
