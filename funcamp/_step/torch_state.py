"""A run changes hands between a torch loop and a step: by the state_dicts of its module, optimizers and scaler.

torch numbers parameters in the order in which its optimizer got them; a step uses their names. A `TorchGroup` has the
names in torch's order. What torch keeps of a parameter has the name under which `state_dict` exports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.arguments import torch_group
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.hyperparameters import map_items
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim import RULES
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.state_dict import CONSTANTS, from_state_dict, to_state_dict
from funcamp._step.state import TrainState, check_train_state
from funcamp._step.state_dict import export, restore
from funcamp._types import StateDict

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep


# The groups of a step, as torch's optimizer has them.


class TorchGroup(NamedTuple):
    """One parameter group of torch's optimizer."""

    label: str | None
    """Its label in `by_group`; None without."""
    optimizer: StatelessOptimizer
    names: list[str]
    """The names of its parameters, in torch's order."""

    @property
    def is_of_torch(self) -> bool:
        """Return whether the class is torch.optim's, so that torch's format holds its state."""
        return self.optimizer._cls in RULES

    @property
    def prefix(self) -> str:
        """Return the prefix of the optimizer's state among the exported names."""
        return "opt_state." if self.label is None else f"opt_state.{self.label}."

    def key(self, entry: str, name: str) -> str:
        """Return the exported name of an optimizer entry of a parameter."""
        return f"{self.prefix}state.{entry}.{name}"

    def states_in(self, saved: Mapping[str, Tensor]) -> dict[str, StateDict]:
        """Return the exported entries of each parameter, by the parameter's name and by theirs."""
        states: dict[str, StateDict] = {}
        for entry_and_name, value in _part(saved, f"{self.prefix}state.").items():
            entry, _, name = entry_and_name.partition(".")
            states.setdefault(name, {})[entry] = value
        return states


def groups_of(call: str, step: TrainStep, state: TrainState) -> list[TorchGroup]:
    """Return the parameter groups of torch's optimizer: one, or one for each label of `by_group`.

    A group has the parameters in the order of the module, frozen ones too.

    Args:
        call: the public function, for errors.
        step: the step.
        state: a state of it.

    Raises:
        TypeError: an optimizer was not made by `stateless`.
    """
    labels = state.params.layout.label_of()
    of_module: dict[str, nn.Parameter] = {}
    if isinstance(step.loss_fn, ModuleLoss):
        of_module = dict(step.loss_fn.model.named_parameters())
    names = list(of_module or labels)
    optimizer = only_optimizer_of(step.optimizer)
    if isinstance(optimizer, GroupedOptimizer):
        frozen_names = [name for name in names if name not in labels]
        labels |= {name: optimizer.group(name, of_module[name]) for name in frozen_names}
        groups: list[TorchGroup] = []
        for label, optimizer_of_label in optimizer.optimizers.items():
            groups.append(TorchGroup(label, optimizer_of_label, [name for name in names if labels[name] == label]))
    else:
        groups = [TorchGroup(None, optimizer, names)]
    for group in groups:
        if not isinstance(group.optimizer, StatelessOptimizer):
            raise TypeError(f"{call}: the step's optimizer must be made by stateless; got {group.optimizer!r}")
    return groups


def hyperparameters_of(optimizer: StatelessOptimizer, applied: Tensor) -> dict[str, object]:
    """Return the numbers of a torch.optim group after some applied steps: schedules evaluated, defaults included."""
    arguments: dict[str, Any] = {}
    for name, value in (optimizer._hyperparameters | optimizer._hyper(applied)).items():
        arguments[name] = _as_number(value)
    group = torch_group(optimizer._cls, arguments)
    return {name: value for name, value in group.items() if name != "params"}


def _as_number(value: object) -> object:
    """Return a hyperparameter as a number, or as a tuple of numbers."""
    if isinstance(value, list):
        value = tuple(value)
    return map_items(lambda _, item: item.item() if isinstance(item, Tensor) else item, "", value)


def _torch_optimizers(call: str, step: TrainStep, state: TrainState) -> dict[str | None, list[TorchGroup]]:
    """Return the groups of each of torch's optimizers: one, by the label None; or one by label, if classes differ.

    Raises:
        TypeError: a class is not torch.optim's, so that torch's format may not hold its state; and as `groups_of`.
    """
    groups = groups_of(call, step, state)
    for group in groups:
        if not group.is_of_torch:
            raise TypeError(
                f"{call}: the step's optimizer must be of a class of torch.optim; got {group.optimizer!r}: save and "
                "load with step.state_dict and step.load_state_dict; a module's values are "
                "loss_fn.state_dict(state.params, state.buffers)"
            )
    if len({group.optimizer._cls for group in groups}) == 1:
        return {None: groups}
    return {group.label: [group] for group in groups}


def _part(saved: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the exported tensors whose names have a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


# To torch.


def to_torch(step: TrainStep, state: TrainState) -> StateDict:
    """Return the state_dicts of `TrainStep.to_torch`."""
    saved = export("to_torch", state)
    optimizers: dict[str | None, StateDict] = {}
    for label, groups in _torch_optimizers("to_torch", step, state).items():
        optimizers[label] = _optimizer_state_dict(groups, saved)
    model = _part(saved, "params.")
    if isinstance(step.loss_fn, ModuleLoss):
        model = step.loss_fn.state_dict(model, _part(saved, "buffers."))
    return {
        "model": model,
        "optimizer": optimizers.get(None, optimizers),
        "scaler": to_state_dict(state.scaler, step.config),
    }


def _optimizer_state_dict(groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]) -> StateDict:
    """Return the state_dict of one torch optimizer."""
    state: dict[int, StateDict] = {}
    param_groups: list[StateDict] = []
    count = 0
    for group in groups:
        numbers = range(count, count + len(group.names))
        states = group.states_in(saved)
        for number, name in zip(numbers, group.names):
            parameter_state = _as_torchs(states.get(name, {}))
            if parameter_state:
                state[number] = parameter_state
        hyperparameters = hyperparameters_of(group.optimizer, saved[f"{group.prefix}applied"])
        param_groups.append({**hyperparameters, "params": list(numbers)})
        count += len(numbers)
    return {"state": state, "param_groups": param_groups}


def _as_torchs(entries: StateDict) -> StateDict:
    """Return torch's state of one parameter; empty for a frozen one, and for one that no step has changed."""
    # The count of steps that changed the parameter, for classes whose first step differs; torch has no such entry.
    if entries.pop(APPLIED_ENTRY, None) == 0:
        return {}
    if "step" in entries:
        entries["step"] = entries["step"].cpu()  # torch stores the step counter on the host
    return entries


# From torch.


def from_torch(
    step: TrainStep,
    like: TrainState,
    optimizer: Mapping[str, StateDict] | StateDict | None,
    scaler: StateDict | None,
    steps: int | None,
) -> TrainState:
    """Return the state of `TrainStep.from_torch`: like's, into whose exported tensors torch's are written."""
    call = "from_torch"
    check_train_state(call, "like", like)
    saved = export(call, like)
    if optimizer is not None:
        groups_by_label = _torch_optimizers(call, step, like)
        state_dicts: Any = {None: optimizer} if None in groups_by_label else optimizer
        if not isinstance(state_dicts, Mapping) or state_dicts.keys() != groups_by_label.keys():
            labels = list(groups_by_label)
            raise ValueError(f"{call}: optimizer must have a state_dict for each of {labels}; got {list(optimizer)}")
        for label, groups in groups_by_label.items():
            _read_optimizer(call, state_dicts[label], groups, saved)
        _read_counts(call, [group for groups in groups_by_label.values() for group in groups], steps, saved)
    if scaler is not None:
        saved |= _scaler_tensors(call, step, scaler, like)
    return restore(saved, like)


def _read_optimizer(call: str, state_dict: StateDict, groups: Sequence[TorchGroup], saved: dict[str, Tensor]) -> None:
    """Write a torch optimizer's state among the exported tensors.

    Raises:
        TypeError: it is no state_dict of an optimizer.
        ValueError: its parameters are not the step's, or its class or hyperparameters are others.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = _tree.brief(state_dict)
        raise TypeError(f"{call}: optimizer must be the state_dict() of a torch.optim.Optimizer; got {got}")
    names = _names_by_number(call, state_dict, groups, saved)
    groups_by_name = {name: group for group in groups for name in group.names}
    known = {group.label: group.states_in(saved) for group in groups}
    for saved_group in state_dict["param_groups"]:
        for number in saved_group["params"]:
            name = names[number]
            if name not in groups_by_name:
                raise ValueError(f"{call}: param_names of optimizer must be of the step's parameters; got {name!r}")
            if _is_trained(name, saved):
                group = groups_by_name[name]
                _check_hyperparameters(call, group.optimizer, saved_group, name)
                own_entries = known[group.label].get(name, {})
                for entry, value in _entries_of(call, name, state_dict["state"].get(number, {}), own_entries).items():
                    saved[group.key(entry, name)] = value


def _names_by_number(
    call: str, state_dict: StateDict, groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]
) -> dict[int, str]:
    """Return the name of each parameter that a torch optimizer has by a number.

    The order is that of the names that torch saved, of an optimizer created with `named_parameters()`; else the
    module's, with or without its frozen parameters.

    Raises:
        ValueError: the numbers of parameters or of groups differ, so that the order is not known.
    """
    saved_groups = state_dict["param_groups"]
    numbers = [number for saved_group in saved_groups for number in saved_group["params"]]
    own_names = [name for group in groups for name in group.names]
    orders = [[name for saved_group in saved_groups for name in saved_group.get("param_names", ())]]
    if len(saved_groups) == len(groups):  # several groups have another order
        orders += [own_names, [name for name in own_names if _is_trained(name, saved)]]
    for names in orders:
        if len(names) == len(numbers):
            return dict(zip(numbers, names))
    raise ValueError(
        f"{call}: optimizer must have the step's parameters; it has {len(numbers)} in {len(saved_groups)} groups, the "
        f"step {len(own_names)} in {len(groups)}: if they are the same in another order, write their names into it, "
        "group['param_names'] = [...] for each group of optimizer['param_groups']"
    )


def _is_trained(name: str, saved: Mapping[str, Tensor]) -> bool:
    """Return whether the state has a parameter; frozen ones are only in the module."""
    return f"params.{name}" in saved


def _entries_of(
    call: str, name: str, entries: Mapping[str, object], own_entries: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return torch's state of one parameter in the form of the step's own.

    Raises:
        ValueError: torch's class has other entries.
    """
    # A class may save None for an entry that it does not use.
    values = {entry: value for entry, value in entries.items() if value is not None}
    if APPLIED_ENTRY in own_entries:
        # torch has no entries of a parameter that no step has changed.
        values[APPLIED_ENTRY] = 1 if values else 0
    unknown = [entry for entry in values if entry not in own_entries]
    if unknown:
        raise ValueError(
            f"{call}: optimizer must be of the step's class, which keeps {list(own_entries)} for {name!r}; got "
            f"{unknown[0]!r}"
        )
    return {entry: torch.as_tensor(value).to(own_entries[entry]) for entry, value in values.items()}


def _check_hyperparameters(
    call: str, optimizer: StatelessOptimizer, saved_group: Mapping[str, object], name: str
) -> None:
    """Raise ValueError if a saved group has another number than the step would continue with."""
    for key, own_value in optimizer._constants.items():
        # Dynamic ones are tensors and schedules: the step goes on with its own.
        if key not in saved_group or key in optimizer._dynamic:
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
            if not counts and any(map(callable, _tree.leaves(group.optimizer._hyperparameters))):
                raise ValueError(
                    f"{call}: steps must be given, the number of steps applied, as a schedule counts them and torch's "
                    f"{group.optimizer._cls.__name__} does not"
                )
        steps = max(counts, default=0)
    numbers = {"step": steps, "skipped": 0, "consecutive_skips": 0}
    numbers |= {f"{group.prefix}applied": steps for group in groups}
    saved.update({key: torch.full_like(saved[key], number) for key, number in numbers.items()})


def _scaler_tensors(call: str, step: TrainStep, state_dict: StateDict, like: TrainState) -> dict[str, Tensor]:
    """Return the state of a torch scaler as exported tensors.

    Raises:
        ValueError: its constants are not the step's.
    """
    scaler_state, saved_config = from_state_dict(state_dict, step.config, device=like.scaler.scale.device)
    for name in CONSTANTS:
        own_value = getattr(step.config, name)
        value = getattr(saved_config, name)
        if own_value != value:
            raise ValueError(
                f"{call}: scaler must have the step's {name}, {own_value}; got {value}: make the step with "
                f"ScalerConfig({name}={value})"
            )
    return {f"scaler.{name}": value for name, value in scaler_state._asdict().items()}
