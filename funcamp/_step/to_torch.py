"""The state_dicts with which a torch loop continues a step: of its module, its optimizer and its scaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.state_dict import to_state_dict
from funcamp._step.state import TrainState
from funcamp._step.state_dict import export, gather
from funcamp._step.torch_groups import Step, TorchGroup, groups_of, has_several_classes, hyperparameters_of
from funcamp._types import StateDict


def to_torch(step: Step, state: TrainState, names: Iterable[str] | None) -> StateDict:
    """Return the state_dicts of `TrainStep.to_torch`."""
    saved = export("to_torch", state)
    groups = groups_of("to_torch", step, state, names)
    optimizer: dict[str | None, StateDict] | StateDict
    if has_several_classes(only_optimizer_of(step.optimizer)):
        optimizer = {group.label: _optimizer_state_dict([group], saved) for group in groups}
    else:
        optimizer = _optimizer_state_dict(groups, saved)
    return {
        "model": _model_state_dict(step.loss_fn, state, saved),
        "optimizer": optimizer,
        "scaler": to_state_dict(state.scaler, step.config),
    }


def _model_state_dict(loss_fn: Loss, state: TrainState, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's state_dict; for a loss without a module, parameters and buffers by name."""
    if isinstance(loss_fn, ModuleLoss):
        return loss_fn.state_dict(gather("to_torch", state).params, state.buffers)
    tensors: dict[str, Tensor] = {}
    for key, tensor in saved.items():
        field, _, name = key.partition(".")
        if field in ("params", "buffers") and name:
            tensors[name] = tensor
    return tensors


def _optimizer_state_dict(groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]) -> StateDict:
    """Return the state_dict of one torch optimizer."""
    state: dict[int, StateDict] = {}
    param_groups: list[StateDict] = []
    next_number = 0
    for group in groups:
        entries = group.entries_in(saved)
        numbers = list(range(next_number, next_number + len(group.names)))
        next_number += len(numbers)
        hyperparameters = hyperparameters_of(group.optimizer, saved[f"{group.prefix}applied"])
        hyperparameters |= _shared(group, saved)
        param_groups.append({**hyperparameters, "params": numbers})
        for number, name in zip(numbers, group.names):
            parameter_state = _parameter_state(group, entries, name, saved)
            if parameter_state:
                state[number] = parameter_state
    return {"state": state, "param_groups": param_groups}


def _shared(group: TorchGroup, saved: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what torch's class keeps in its parameter group besides hyperparameters."""
    entries = group.shared_in(saved)
    if not entries:
        return {}
    numbers = group.numbers_among(entries, saved[f"params.{group.names[0]}"])
    values = {entry: saved[group.key_of_shared(entry)] for entry in entries}
    return {entry: value.item() if entry in numbers else value for entry, value in values.items()}


def _parameter_state(group: TorchGroup, entries: Iterable[str], name: str, saved: Mapping[str, Tensor]) -> StateDict:
    """Return torch's state of one parameter; empty for a frozen one, and for one that no step has changed."""
    parameter_state: StateDict = {}
    for entry in entries:
        key = group.key(entry, name)
        if key in saved:
            parameter_state[entry] = saved[key]
    # The count of steps that changed the parameter, for classes whose first step differs; torch has no such entry.
    if APPLIED_ENTRY in parameter_state and parameter_state.pop(APPLIED_ENTRY) == 0:
        return {}
    if parameter_state:
        for entry in group.numbers_among(parameter_state, saved[f"params.{name}"]):
            parameter_state[entry] = parameter_state[entry].item()
    step = parameter_state.get("step")
    if isinstance(step, Tensor):
        parameter_state["step"] = step.cpu()  # torch stores the step counter on the host
    return parameter_state
