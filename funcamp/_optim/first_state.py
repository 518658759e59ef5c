"""The state of a class before its first step, in which most classes make it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcamp._dtensor import is_distributed
from funcamp._optim.class_state import ClassState, Entries, Entry, as_tensor, entries_in, zero_of
from funcamp._optim.class_step import STAGE_ENTRY, ClassStep
from funcamp._optim.containers import leaves_of
from funcamp._optim.hyperparameters import Hyper
from funcamp._optim.instance_state import Contents
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY

#: The first state of a large parameter is found in chunks of this many elements. With AdamW `init` then needs 18
#: bytes a parameter instead of 40.
CHUNK_SIZE = 1 << 20


def first_state(
    step: ClassStep,
    params: list[Tensor],
    hyper: Hyper,
    *,
    starts_at_zero: bool,
    can_split: Callable[[Tensor], bool] = lambda _: False,
) -> ClassState:
    """Return the state of parameters before the first step.

    For most classes it consists of the first values in a step with a zero gradient.

    Args:
        step: the class.
        params: the parameters.
        hyper: the hyperparameters that are tensors.
        starts_at_zero: whether these are only examples of the tensors, and the state starts at zero.
        can_split: returns whether a step of a chunk of a parameter is the part of its step.
    """
    if step.changing.shared_names or not step.is_separable(params):  # a class may make states together
        return _first_state(step, params, hyper, starts_at_zero=starts_at_zero)
    per_param: list[Entries] = []
    for param in params:
        # A step's temporaries are several times its input, so run it chunk by chunk if possible.
        is_large = param.numel() > CHUNK_SIZE
        if is_large and param.is_contiguous() and not is_distributed(param) and can_split(param):
            per_param.append(_by_chunks(step, param, hyper, starts_at_zero=starts_at_zero))
        else:
            per_param += _first_state(step, [param], hyper, starts_at_zero=starts_at_zero).per_param
    return ClassState(per_param, {})


def _by_chunks(step: ClassStep, param: Tensor, hyper: Hyper, *, starts_at_zero: bool) -> Entries:
    """Return the first state of a contiguous parameter, from steps on its chunks."""
    entries: Entries = {}
    for index, chunk in enumerate(torch.split(param.view(-1), CHUNK_SIZE)):
        for name, value in _first_state(step, [chunk], hyper, starts_at_zero=starts_at_zero).per_param[0].items():
            if value.dim() == 0:  # a counter
                entries.setdefault(name, value)
                continue
            if name not in entries:
                entries[name] = torch.empty_like(param, dtype=value.dtype)
            torch.split(entries[name].view(-1), CHUNK_SIZE)[index].copy_(value)
    return entries


def _first_state(step: ClassStep, params: list[Tensor], hyper: Hyper, *, starts_at_zero: bool) -> ClassState:
    """Return the state of parameters before the first step, from one step of all of them."""
    form = step.form(params)
    zero_grads = [torch.zeros_like(param) for param in params]
    step_run = step.run(params, zero_grads, None, hyper, step.decisions())
    per_param: list[Entries] = []
    contents_before_and_after = zip(step_run.first_values.per_param, step_run.state.per_param)
    for index, (first_values, contents) in enumerate(contents_before_and_after):
        param = params[index]
        entries = _before(first_values, contents, form.per_param[index], param, starts_at_zero=starts_at_zero)
        if form.later_forms:
            unmade = {name: entry for name, entry in form.param_entries(index).items() if name not in entries}
            entries |= {name: zero_of(entry, param) for name, entry in unmade.items()}
            entries[STAGE_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
        if step.first_step_may_differ([param]):
            entries[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
        per_param.append(entries)
    first_values, contents = step_run.first_values.shared, step_run.state.shared
    shared = _before(first_values, contents, form.shared, params[0], starts_at_zero=starts_at_zero)
    if shared and any(APPLIED_ENTRY in entries for entries in per_param):
        shared[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=params[0].device)
    return ClassState(per_param, shared)


def _before(
    first_values: Contents, contents: Contents, form: Contents, like: Tensor, *, starts_at_zero: bool
) -> Entries:
    """Return the entries before the first step.

    Args:
        first_values: the first value of each name in a step with a zero gradient.
        contents: what there is after it.
        form: the form of that.
        like: the parameter, or the first one for what all share.
        starts_at_zero: as in `first_state`.
    """
    first_leaves = leaves_of(first_values)
    last_leaves = leaves_of(contents)
    entries: Entries = {}
    for name, entry in entries_in(form).items():
        last = _tensor(last_leaves.get(name), entry, like)
        value = _tensor(first_leaves.get(name), entry, like)
        if value is None or (last is not None and value.shape != last.shape):
            value = last  # it was None or not there
        if value is None:  # only another path makes it
            value = zero_of(entry, like)
        entries[name] = torch.zeros_like(value) if starts_at_zero else value
    return entries


def _tensor(value: object, entry: Entry, like: Tensor) -> Tensor | None:
    """Return a value of an entry as a tensor; a number before the first step gets the dtype that it has after it."""
    dtype = None
    if entry.example is not None and not isinstance(value, Tensor):
        dtype = entry.example.dtype
    return as_tensor(value, entry.kind, like, dtype)
