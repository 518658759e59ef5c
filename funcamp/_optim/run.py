"""Run one step of a torch.optim class as a pure function, without reading a tensor on the host.

The class's own constructor and `step` run on clones, in an instance created for the call, with the state put into it.
`PureCalls` replaces what torch would read on the host, for the current thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._optim.class_state import ClassState, Entries, Form
from funcamp._optim.decisions import Decisions
from funcamp._optim.hyperparameters import Hyper, map_items
from funcamp._optim.instance import (
    Change,
    begin_recording,
    changes_between,
    first_values,
    instance_of,
    put_state,
    set_in_group,
    step_of,
    versions_of,
)
from funcamp._optim.instance_state import InstanceState, read_state
from funcamp._optim.number import as_number
from funcamp._optim.pure_calls import PureCalls, batched_like
from funcamp._optim.python_names import names_for_numbers
from funcamp._trace.as_compiled import as_eager
from funcamp._types import Kwargs

#: With more tensors than _FEW_TENSORS, scalars are left to the compiler, because one buffer for each would be too many.
#: Except on a CPU with at least _MANY_ELEMENTS on average, where a power would be recomputed for every 16 of them.
_FEW_TENSORS = 16
_MANY_ELEMENTS = 1024

#: Devices on which torch.optim supports capturable=True and so keeps counters there. On others `PureCalls` does.
_CAPTURABLE = ("cuda", "xpu", "hpu")


def refuse_differentiation(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if torch.func differentiates a tensor: the gradient would silently be zero."""
    for tensor in tensors:
        inner = tensor
        while _upstream.is_wrapped(inner):
            if _upstream.is_differentiated(inner):
                raise ValueError(
                    "update: params and grads must not be differentiated, as no gradient flows through a torch.optim "
                    f"step; detach them, or write the inner update by hand; got {type(tensor).__name__} under "
                    "torch.func.grad, vjp or jacrev"
                )
            inner = _upstream.unwrapped(inner)


def _settles_scalars(params: list[Tensor]) -> bool:
    """Return whether scalars are computed once, each in a buffer, instead of at each use."""
    if len(params) <= _FEW_TENSORS:
        return True
    element_count = sum(param.numel() for param in params)
    return params[0].device.type == "cpu" and element_count >= _MANY_ELEMENTS * len(params)


def _numbers(arguments: Kwargs, hyper: Hyper, decisions: Decisions) -> tuple[Kwargs, list[Tensor]]:
    """Return the hyperparameters as the class gets them, and those of their tensors that vmap batches."""
    batched: list[Tensor] = []

    def number(label: str, value: object, example: float) -> object:
        if not isinstance(value, Tensor):
            return value
        if _upstream.is_batched(value):
            batched.append(value)
        return as_number(
            label, example, value, decisions, decisions.key(("hyperparameter", label)), is_hyperparameter=True
        )

    numbers = {name: map_items(number, name, value, arguments.get(name)) for name, value in hyper.items()}
    return numbers, batched


class StepRun(NamedTuple):
    """The results of one run of a class's step."""

    params: list[Tensor]
    """The new parameters."""
    state: InstanceState
    """What the instance keeps after the step."""
    first_values: InstanceState
    """The first value of each part of that; nothing if a state was given."""
    changed: dict[str, Change]
    """What the step has changed of what all share and is not in the form, by name."""


def run_step(
    cls: type[torch.optim.Optimizer],
    arguments: Kwargs,
    hyper: Hyper,
    params: list[Tensor],
    grads: Sequence[Tensor | None],
    state: ClassState | None,
    form: Form | None,
    decisions: Decisions,
    *,
    writes_grads: bool = True,
    wide_counters: bool = True,
    constructs_with_numbers: bool = False,
    method: str | None = None,
    observe: Callable[[torch.optim.Optimizer], None] | None = None,
) -> StepRun:
    """Take one step of `cls(params, **arguments)` from a given state.

    Args:
        cls: the optimizer's class.
        arguments: Python values for its constructor; examples if a hyperparameter is a tensor.
        hyper: what is set in the parameter group of an instance, as a scheduler of torch does: the hyperparameters that
            are tensors of shape (), or tuples with such tensors.
        params: parameters, at least one.
        grads: their gradients, of the same shapes, or None; cast to the parameter's dtype.
        state: the state; None to start without one and record the first values.
        form: how the class stores it.
        decisions: the answers to its questions.
        writes_grads: whether the class writes into gradients, which are then cloned.
        wide_counters: whether to use float64 step counters inside, on a CPU.
        constructs_with_numbers: whether the constructor gets tensors for numbers, too: of a first state.
        method: the name of another method of the class to call, without arguments.
        observe: called with the instance before the step and after it: in a trial.
    """
    numbers, batched = _numbers(arguments, hyper, decisions)
    with torch.no_grad():
        new_params = _clones_with_grads(params, grads, batched, clone_grads=writes_grads)
        if "capturable" in arguments:
            arguments = arguments | {"capturable": new_params[0].device.type in _CAPTURABLE}
        pure = PureCalls(_settles_scalars(new_params), new_params, batched, decisions)
        with names_for_numbers(cls, decisions), pure, as_eager(), decisions.raising_refusals():
            if constructs_with_numbers:
                arguments = arguments | {name: value for name, value in numbers.items() if name in arguments}
            optimizer = instance_of(cls, new_params, arguments)
            decisions.is_constructing = False
            if decisions.hides_examples:
                numbers, _ = _numbers(arguments, hyper, decisions)
            set_in_group(optimizer, numbers)
            if state is None:
                begin_recording(optimizer)
            else:
                assert form is not None
                state_to_change = _clones_of(state, batched, wide_counters=wide_counters)
                put_state(optimizer, new_params, state_to_change, form, decisions)
            before = versions_of(optimizer, new_params)
            if observe is not None:
                observe(optimizer)
            (step_of(optimizer) if method is None else getattr(optimizer, method))()
            if observe is not None:
                observe(optimizer)
            after = versions_of(optimizer, new_params)
    for param in new_params:
        param.grad = None
    first = first_values(optimizer, new_params) if state is None else InstanceState([], {})
    return StepRun(new_params, read_state(optimizer, new_params), first, changes_between(before, after, form))


def constructed_state(
    cls: type[torch.optim.Optimizer],
    arguments: Kwargs,
    hyper: Hyper,
    params: list[Tensor],
    decisions: Decisions,
) -> InstanceState:
    """Return what a new instance keeps. Arguments as in `run_step`."""
    numbers, batched = _numbers(arguments, hyper, decisions)
    pure = PureCalls(_settles_scalars(params), params, batched, decisions)
    with torch.no_grad(), names_for_numbers(cls, decisions), pure, as_eager(), decisions.raising_refusals():
        return read_state(instance_of(cls, params, arguments | numbers), params)


def _clones_with_grads(
    params: list[Tensor], grads: Sequence[Tensor | None], batched: list[Tensor], *, clone_grads: bool
) -> list[Tensor]:
    """Return clones of parameters, with the gradients in `grad`; without clone_grads these may be the caller's."""
    clones = [batched_like(batched, param.detach().clone()) for param in params]
    for param, grad in zip(clones, grads):
        if grad is None:
            continue
        grad = batched_like(batched, grad.detach().to(param.dtype))
        param.grad = grad.clone() if clone_grads else grad
    return clones


def _clones_of(state: ClassState, batched: list[Tensor], *, wide_counters: bool) -> ClassState:
    """Return a state that a class may write into."""

    def clones(entries: Entries) -> Entries:
        copies = {name: batched_like(batched, value.clone()) for name, value in entries.items()}
        return {name: _widened_counter(name, value) for name, value in copies.items()} if wide_counters else copies

    return ClassState(list(map(clones, state.per_param)), clones(state.shared))


def _widened_counter(name: str, value: Tensor) -> Tensor:
    """Return a step counter in float64 on a CPU, any other entry of a state as it is.

    torch.optim takes powers of the step in Python floats, with capturable=True in float32.
    """
    # Not done in `item`, because torch.optim does not call it under torch.compile.
    if name == "step" and value.dim() == 0 and value.device.type == "cpu" and value.is_floating_point():
        return value.double()
    return value
