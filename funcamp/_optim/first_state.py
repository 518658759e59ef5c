"""The state of a class before its first step, in which most classes make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp._dtensor import is_distributed
from funcamp._optim.class_state import ClassState, Entries, Entry, as_tensor, entries_in, zero_of
from funcamp._optim.class_step import APPLIED_ENTRY, STAGE_ENTRY, ClassStep
from funcamp._optim.containers import leaves_of

#: The first state of a large parameter is found in chunks of this many elements. With AdamW `init` then needs 18
#: bytes a parameter instead of 40.
CHUNK_SIZE = 1 << 20


def first_state(
    step: ClassStep,
    params: list[Tensor],
    hyper: dict[str, Any],
    *,
    starts_at_zero: bool,
    by_chunks: Callable[[Tensor], bool] = lambda _: False,
) -> ClassState:
    """Return the state of parameters before the first step.

    For most classes it consists of the first values in a step with a zero gradient.

    Args:
        step: the class.
        params: the parameters.
        hyper: the hyperparameters that are tensors.
        starts_at_zero: whether these are only examples of the tensors, and the state starts at zero.
        by_chunks: returns whether a step of a chunk of a parameter is the part of its step.
    """
    if step.changing.shared_names or not step.is_separable(params):  # a class may make states together
        return _first_state(step, params, hyper, starts_at_zero=starts_at_zero)
    leaves: list[Entries] = []
    for param in params:
        # A step's temporaries are several times its input, so run it chunk by chunk if possible.
        is_large = param.numel() > CHUNK_SIZE
        if is_large and param.is_contiguous() and not is_distributed(param) and by_chunks(param):
            leaves.append(_by_chunks(step, param, hyper, starts_at_zero=starts_at_zero))
        else:
            leaves += _first_state(step, [param], hyper, starts_at_zero=starts_at_zero).leaves
    return ClassState(leaves, {})


def _by_chunks(step: ClassStep, param: Tensor, hyper: dict[str, Any], *, starts_at_zero: bool) -> Entries:
    """Return the first state of a contiguous parameter, from steps on its chunks."""
    entries: Entries = {}
    for index, chunk in enumerate(torch.split(param.view(-1), CHUNK_SIZE)):
        for name, value in _first_state(step, [chunk], hyper, starts_at_zero=starts_at_zero).leaves[0].items():
            if value.dim() == 0:  # a counter
                entries.setdefault(name, value)
                continue
            if name not in entries:
                entries[name] = torch.empty_like(param, dtype=value.dtype)
            torch.split(entries[name].view(-1), CHUNK_SIZE)[index].copy_(value)
    return entries


def _first_state(step: ClassStep, params: list[Tensor], hyper: dict[str, Any], *, starts_at_zero: bool) -> ClassState:
    form = step.form(params)
    zero_grads = [torch.zeros_like(param) for param in params]
    step_run = step.run(params, zero_grads, None, hyper, step.decisions())
    leaves: list[Entries] = []
    for index, (first, held, param) in enumerate(zip(step_run.first.leaves, step_run.held.leaves, params)):
        entries = _before(first, held, form.leaves[index], param, starts_at_zero=starts_at_zero)
        if form.later_leaves:
            unmade = {name: entry for name, entry in form.leaf_entries(index).items() if name not in entries}
            entries |= {name: zero_of(entry, param) for name, entry in unmade.items()}
            entries[STAGE_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
        if step.begins_otherwise([param]):
            entries[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
        leaves.append(entries)
    shared = _before(step_run.first.shared, step_run.held.shared, form.shared, params[0], starts_at_zero=starts_at_zero)
    if shared and any(APPLIED_ENTRY in entries for entries in leaves):
        shared[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=params[0].device)
    return ClassState(leaves, shared)


def _before(
    first: Mapping[str, Any], held: Mapping[str, Any], form: Mapping[str, Any], like: Tensor, *, starts_at_zero: bool
) -> Entries:
    """Return the entries before the first step.

    Args:
        first: the first values of a step with a zero gradient.
        held: what there is after it.
        form: the form of that.
        like: the parameter, or the first one for what all share.
        starts_at_zero: as in `first_state`.
    """
    first_values = leaves_of(first)
    last_values = leaves_of(held)
    entries: Entries = {}
    for name, entry in entries_in(form).items():
        last = _tensor(last_values.get(name), entry, like)
        value = _tensor(first_values.get(name), entry, like)
        if value is None or (last is not None and value.shape != last.shape):
            value = last  # it was None or not there
        if value is None:  # only another path makes it
            value = zero_of(entry, like)
        entries[name] = torch.zeros_like(value) if starts_at_zero else value
    return entries


def _tensor(value: object, entry: Entry, like: Tensor) -> Tensor | None:
    is_number = entry.example is not None and not isinstance(value, Tensor)  # before the first step
    return as_tensor(value, entry.kind, like, entry.example.dtype if is_number and entry.example is not None else None)
