"""A run changes hands between a torch loop and a step: by the state_dicts of its module, optimizers and scaler.

torch numbers parameters in the order in which its optimizer got them; a step uses their names. A `TorchGroup` has the
names in torch's order. What torch keeps of a parameter has the name under which `state_dict` exports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.arguments import WITHOUT_EFFECT, torch_group
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim import RULES
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.state_dict import from_state_dict, to_state_dict
from funcamp._step.state import TrainState, check_train_state
from funcamp._step.state_dict import export, gather, restore
from funcamp._types import StateDict

#: Entries of a torch group that do not affect the result: how the class runs, and what a scheduler stores there.
_WITHOUT_EFFECT = (*WITHOUT_EFFECT, "param_names", "initial_lr")
#: The constants of a configuration that torch's scaler has, too.
_SCALER_CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval")


class Step(Protocol):
    """What the conversion asks of a `TrainStep`."""

    loss_fn: Loss
    optimizer: object
    config: ScalerConfig


# The groups of a step, as torch's optimizer has them.


class TorchGroup(NamedTuple):
    """One parameter group of torch's optimizer."""

    label: str | None
    """Its label in `by_group`; None without."""
    optimizer: StatelessOptimizer
    prefix: str
    """The prefix of its entries among the exported names."""
    names: list[str]
    """The names of its parameters, in torch's order."""

    @property
    def is_of_torch(self) -> bool:
        """Return whether the class is torch.optim's, so that torch's format holds its state."""
        return self.optimizer._cls in RULES

    def key(self, entry: str, name: str) -> str:
        """Return the exported name of an optimizer entry of a parameter."""
        return f"{self.prefix}state.{entry}.{name}"

    def entries_in(self, saved: Iterable[str]) -> list[str]:
        """Return the names of the optimizer's entries, as in torch, that are among exported names."""
        start = f"{self.prefix}state."
        return list(dict.fromkeys(key.removeprefix(start).partition(".")[0] for key in saved if key.startswith(start)))


def groups_of(call: str, step: Step, state: TrainState, names: Iterable[str] | None) -> list[TorchGroup]:
    """Return the parameter groups of torch's optimizer: one, or one for each label of `by_group`.

    Args:
        call: the public function, for errors.
        step: the step.
        state: a state of it.
        names: the parameters in the order in which torch's optimizer got them; None for the module's.

    Raises:
        TypeError: an optimizer was not made by `stateless`.
        ValueError: names are not those of the step's parameters.
    """
    labels = state.params.layout.label_of()
    optimizer = only_optimizer_of(step.optimizer)
    of_module: dict[str, nn.Parameter] = {}
    if isinstance(step.loss_fn, ModuleLoss):
        of_module = dict(step.loss_fn.model.named_parameters())
    order = list(names if names is not None else of_module or labels)
    is_repeated = len(set(order)) < len(order)
    if is_repeated or not labels.keys() <= set(order) <= labels.keys() | of_module.keys():
        odd = sorted(labels.keys() ^ set(order))
        raise ValueError(f"{call}: names must be those of the step's parameters, each once; got {order}, odd is {odd}")

    if not isinstance(optimizer, GroupedOptimizer):
        return [TorchGroup(None, _made_by_stateless(call, optimizer), "opt_state.", order)]
    for name in order:
        if name not in labels:  # a frozen parameter of the module
            labels[name] = optimizer.group(name, of_module[name])
    groups: list[TorchGroup] = []
    for label, optimizer_of_label in optimizer.optimizers.items():
        names_of_label = [name for name in order if labels[name] == label]
        made = _made_by_stateless(call, optimizer_of_label)
        groups.append(TorchGroup(label, made, f"opt_state.{label}.", names_of_label))
    return groups


def _made_by_stateless(call: str, optimizer: object) -> StatelessOptimizer:
    if not isinstance(optimizer, StatelessOptimizer):
        raise TypeError(f"{call}: the step's optimizer must be made by stateless; got {optimizer!r}")
    return optimizer


def _check_classes(call: str, groups: Iterable[TorchGroup]) -> None:
    """Raise TypeError for a class that is not torch.optim's, whose state torch's format may not hold."""
    for group in groups:
        if not group.is_of_torch:
            raise TypeError(
                f"{call}: the step's optimizer must be of a class of torch.optim; got {group.optimizer!r}: save and "
                "load with step.state_dict and step.load_state_dict; a module's values are "
                "loss_fn.state_dict(state.params, state.buffers)"
            )


def hyperparameters_of(optimizer: StatelessOptimizer, applied: Tensor) -> dict[str, object]:
    """Return the numbers of a torch.optim group after some applied steps: schedules evaluated, defaults included."""
    arguments: dict[str, Any] = {}
    for name, value in (optimizer._hyperparameters | optimizer._hyper(applied, [applied])).items():
        arguments[name] = _as_number(value)
    group = torch_group(optimizer._cls, arguments)
    return {name: value for name, value in group.items() if name != "params"}


def _as_number(value: object) -> object:
    """Return a hyperparameter as a number, or as a tuple of numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(_as_number(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


def _by_optimizer(groups: list[TorchGroup]) -> dict[str | None, list[TorchGroup]]:
    """Return the groups of each of torch's optimizers: one, by the label None; or one by label, if classes differ."""
    classes = {group.optimizer._cls for group in groups}
    if len(classes) == 1:
        return {None: groups}
    return {group.label: [group] for group in groups}


# To torch.


def to_torch(step: Step, state: TrainState, names: Iterable[str] | None) -> StateDict:
    """Return the state_dicts of `TrainStep.to_torch`."""
    saved = export("to_torch", state)
    groups = groups_of("to_torch", step, state, names)
    _check_classes("to_torch", groups)
    optimizers = {label: optimizer_state_dict(members, saved) for label, members in _by_optimizer(groups).items()}
    return {
        "model": _model_state_dict(step.loss_fn, state, saved),
        "optimizer": optimizers.get(None, optimizers),
        "scaler": to_state_dict(state.scaler, step.config),
    }


def _model_state_dict(loss_fn: Loss, state: TrainState, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's state_dict; for a loss without a module, the parameters by name."""
    if isinstance(loss_fn, ModuleLoss):
        return loss_fn.state_dict(gather("to_torch", state).params, state.buffers)
    start = "params."
    return {key.removeprefix(start): tensor for key, tensor in saved.items() if key.startswith(start)}


def optimizer_state_dict(groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]) -> StateDict:
    """Return the state_dict of one torch optimizer."""
    state: dict[int, StateDict] = {}
    param_groups: list[StateDict] = []
    number = 0
    for group in groups:
        entries = group.entries_in(saved)
        numbers: list[int] = []
        for name in group.names:
            parameter_state = _parameter_state(group, entries, name, saved)
            if parameter_state:
                state[number] = parameter_state
            numbers.append(number)
            number += 1
        hyperparameters = hyperparameters_of(group.optimizer, saved[f"{group.prefix}applied"])
        param_groups.append({**hyperparameters, "params": numbers})
    return {"state": state, "param_groups": param_groups}


def _parameter_state(group: TorchGroup, entries: Iterable[str], name: str, saved: Mapping[str, Tensor]) -> StateDict:
    """Return torch's state of one parameter; empty for a frozen one, and for one that no step has changed."""
    keys = {entry: group.key(entry, name) for entry in entries}
    parameter_state: StateDict = {entry: saved[key] for entry, key in keys.items() if key in saved}
    # The count of steps that changed the parameter, for classes whose first step differs; torch has no such entry.
    if APPLIED_ENTRY in parameter_state and parameter_state.pop(APPLIED_ENTRY) == 0:
        return {}
    if "step" in parameter_state:
        parameter_state["step"] = parameter_state["step"].cpu()  # torch stores the step counter on the host
    return parameter_state


# From torch.


def from_torch(
    step: Step,
    like: TrainState,
    optimizer: Mapping[str, StateDict] | StateDict | None,
    scaler: StateDict | None,
    names: Iterable[str] | None,
    steps: int | None,
) -> TrainState:
    """Return the state of `TrainStep.from_torch`."""
    call = "from_torch"
    check_train_state(call, "like", like)
    saved = export(call, like)
    if optimizer is not None:
        groups = groups_of(call, step, like, names)
        _check_classes(call, groups)
        by_optimizer = _by_optimizer(groups)
        labels = [label for label in by_optimizer if label is not None]
        if labels and (not isinstance(optimizer, Mapping) or set(optimizer) != set(labels)):
            raise ValueError(f"{call}: optimizer must have a state_dict for each of {labels}; got {list(optimizer)}")
        for label, members in by_optimizer.items():
            state_dict: Any = optimizer if label is None else optimizer[label]
            _read_optimizer(call, state_dict, members, saved, names_are_given=names is not None)
        _read_counts(call, groups, steps, saved)
    if scaler is not None:
        _read_scaler(call, step.config, scaler, saved)
    return restore(saved, like)


def _read_optimizer(
    call: str,
    state_dict: StateDict,
    groups: Sequence[TorchGroup],
    saved: dict[str, Tensor],
    *,
    names_are_given: bool,
) -> None:
    """Write a torch optimizer's state among the exported tensors.

    Raises:
        TypeError: it is no state_dict of an optimizer.
        ValueError: its parameters are not the step's, or its class or hyperparameters are others.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = _tree.brief(state_dict)
        raise TypeError(f"{call}: optimizer must be the state_dict() of a torch.optim.Optimizer; got {got}")
    names = _names_by_number(call, state_dict, groups, saved, names_are_given=names_are_given)
    groups_by_name = {name: group for group in groups for name in group.names}
    for saved_group in state_dict["param_groups"]:
        checked: set[str] = set()
        for number in saved_group["params"]:
            name = names[number]
            if name not in groups_by_name:
                raise ValueError(f"{call}: names must be of the step's parameters; got {name!r}")
            if not _is_trained(name, saved):
                continue
            group = groups_by_name[name]
            # Once for all parameters of two groups, because the check makes an optimizer of torch's class.
            if group.prefix not in checked:
                _check_hyperparameters(call, group.optimizer, saved_group, name)
                checked.add(group.prefix)
            _read_parameter(call, group, name, state_dict["state"].get(number, {}), saved)


def _names_by_number(
    call: str,
    state_dict: StateDict,
    groups: Sequence[TorchGroup],
    saved: Mapping[str, Tensor],
    *,
    names_are_given: bool,
) -> dict[int, str]:
    """Return the name of each parameter that a torch optimizer has by a number.

    The order is the caller's, which the groups have, if it gave the names; else that of the names that torch saved, of
    an optimizer created with `named_parameters()`; else the module's, with or without its frozen parameters.

    Raises:
        ValueError: the numbers of parameters or of groups differ, so that the order is not known.
    """
    saved_groups = state_dict["param_groups"]
    numbers = [number for saved_group in saved_groups for number in saved_group["params"]]
    saved_names = [name for saved_group in saved_groups for name in saved_group.get("param_names", ())]
    names = [name for group in groups for name in group.names]
    is_known_order = names_are_given or len(saved_groups) == len(groups)  # several groups have another order
    if not names_are_given and saved_names:
        names, is_known_order = saved_names, True
    elif not names_are_given and len(names) != len(numbers):
        # torch's optimizer got only the trainable parameters.
        names = [name for name in names if _is_trained(name, saved)]
    if len(names) != len(numbers) or not is_known_order:
        raise ValueError(
            f"{call}: names must be given, the names of all parameters in the order in which torch's optimizer was "
            f"given them; it has {len(numbers)} in {len(saved_groups)} groups, the step {len(names)} in {len(groups)}"
        )
    return dict(zip(numbers, names))


def _is_trained(name: str, saved: Mapping[str, Tensor]) -> bool:
    """Return whether the state has a parameter; frozen ones are only in the module."""
    return f"params.{name}" in saved


def _read_parameter(
    call: str, group: TorchGroup, name: str, entries: Mapping[str, object], saved: dict[str, Tensor]
) -> None:
    """Write torch's state of one parameter among the exported tensors.

    Raises:
        ValueError: torch's class has other entries.
    """
    # A class may save None for an entry that it does not use.
    values = {entry: value for entry, value in entries.items() if value is not None}
    if group.key(APPLIED_ENTRY, name) in saved:
        # torch has no entries of a parameter that no step has changed.
        values[APPLIED_ENTRY] = 1 if values else 0
    for entry, value in values.items():
        key = group.key(entry, name)
        if key not in saved:
            known = group.entries_in(saved)
            raise ValueError(
                f"{call}: optimizer must be of the step's class, which keeps {known} for {name!r}; got {entry!r}"
            )
        saved[key] = torch.as_tensor(value).to(saved[key].device, saved[key].dtype)


def _check_hyperparameters(
    call: str, optimizer: StatelessOptimizer, saved_group: Mapping[str, object], name: str
) -> None:
    """Raise ValueError if a saved group has another number than the step would continue with."""
    # Dynamic ones are tensors and schedules: the step goes on with its own.
    ignored = (*_WITHOUT_EFFECT, *optimizer._dynamic)
    for key, own_value in torch_group(optimizer._cls, optimizer._arguments).items():
        if key not in saved_group or key in ignored:
            continue
        value = _as_number(saved_group[key])
        if value != _as_number(own_value):
            raise ValueError(
                f"{call}: optimizer must have the step's {key}, {own_value!r}; got {value!r} for {name!r}: make the "
                f"step with stateless(..., {key}={value!r}), or change it in optimizer['param_groups']"
            )


def _read_counts(call: str, groups: Sequence[TorchGroup], steps: int | None, saved: dict[str, Tensor]) -> None:
    """Write the counts of steps among the exported tensors: those given, or the largest of torch's.

    A parameter that was frozen for a while has a lower count than the run.

    Raises:
        ValueError: a hyperparameter follows a count of steps, which torch's optimizers do not have.
    """
    if steps is None:
        keys = [group.key("step", name) for group in groups for name in group.names]
        counts = [int(saved[key]) for key in keys if key in saved]
        for group in groups:
            if not counts and _has_schedule(group.optimizer):
                raise ValueError(
                    f"{call}: steps must be given, the number of steps applied, as a schedule counts them and torch's "
                    f"{group.optimizer._cls.__name__} does not"
                )
        steps = max(counts, default=0)
    numbers = {"step": steps, "skipped": 0, "consecutive_skips": 0}
    numbers |= {f"{group.prefix}applied": steps for group in groups}
    saved.update({key: torch.full_like(saved[key], number) for key, number in numbers.items()})


def _has_schedule(optimizer: StatelessOptimizer) -> bool:
    values = [optimizer._hyperparameters[name] for name in optimizer._dynamic]
    return any(callable(value) for value in _tree.leaves(values))


def _read_scaler(call: str, config: ScalerConfig, state_dict: StateDict, saved: dict[str, Tensor]) -> None:
    """Write the state of a torch scaler among the exported tensors.

    Raises:
        ValueError: its constants are not the step's.
    """
    scaler_state, saved_config = from_state_dict(state_dict, config, device=saved["scaler.scale"].device)
    for name in _SCALER_CONSTANTS:
        own_value = getattr(config, name)
        value = getattr(saved_config, name)
        if own_value != value:
            raise ValueError(
                f"{call}: scaler must have the step's {name}, {own_value}; got {value}: make the step with "
                f"ScalerConfig({name}={value})"
            )
    saved.update({f"scaler.{name}": value for name, value in scaler_state._asdict().items()})
