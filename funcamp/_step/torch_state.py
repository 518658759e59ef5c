"""A run changes hands between a torch loop and a step: by the state_dicts of its module, optimizers and scaler.

torch numbers parameters in the order in which its optimizer got them; a step uses their names. A `TorchGroup` has the
names in torch's order. What torch keeps of a parameter has the name under which `state_dict` exports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import integer
from funcamp._optim.arguments import torch_optimizer
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.hyperparameters import map_items
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim.optimizer import RuleOptimizer
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.state import ScalerState
from funcamp._scaler.state_dict import from_state_dict, to_state_dict
from funcamp._step.state import TrainState, check_train_state
from funcamp._step.state_dict import export, gather, restore
from funcamp._storage.inputs import check_params
from funcamp._types import StateDict

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep


# The groups of a step, as torch's optimizer has them.


class TorchGroup(NamedTuple):
    """One parameter group of torch's optimizer."""

    label: str | None
    """Its label in `by_group`; None without."""
    optimizer: Any
    """A `StatelessOptimizer`; if torch's format is read or written, a `RuleOptimizer`."""
    names: list[str]
    """The names of its parameters, in torch's order."""

    @property
    def prefix(self) -> str:
        """Return the prefix of the optimizer's state among the exported names."""
        return "opt_state." if self.label is None else f"opt_state.{self.label}."

    def key(self, entry: str, name: str) -> str:
        """Return the exported name of an optimizer entry of a parameter."""
        return f"{self.prefix}state.{entry}.{name}"

    def entries_in(self, saved: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return the exported entries of a parameter; none for a frozen one."""
        of_vector, of_matrix = self.optimizer.entry_names
        keys = {entry: self.key(entry, name) for entry in (*of_vector, *of_matrix)}
        return {entry: saved[key] for entry, key in keys.items() if key in saved}


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
    labels = {name: step.group(name, value) for name, value in step.loss_fn.module_parameters().items()}
    labels |= state.params.layout.label_of()  # of the function with which the state was made
    optimizer = only_optimizer_of(step.optimizer)
    optimizers = optimizer.optimizers if isinstance(optimizer, GroupedOptimizer) else {None: optimizer}
    groups: list[TorchGroup] = []
    for label, optimizer_of_label in optimizers.items():
        if not isinstance(optimizer_of_label, StatelessOptimizer):
            raise TypeError(f"{call}: the step's optimizer must be made by stateless; got {optimizer_of_label!r}")
        names = [name for name in labels if label in (None, labels[name])]
        groups.append(TorchGroup(label, optimizer_of_label, names))
    return groups


def hyperparameters_of(optimizer: StatelessOptimizer, applied: Tensor) -> dict[str, object]:
    """Return the numbers of a torch.optim group after some applied steps: schedules evaluated, defaults included."""
    arguments: dict[str, Any] = {}
    for name, value in (optimizer.hyperparameters | optimizer.hyper(applied)).items():
        arguments[name] = map_items(_as_number, value)
    group = torch_optimizer(optimizer.cls, arguments).param_groups[0]
    del group["params"]
    return group


def _as_number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value


def _torch_optimizers(call: str, step: TrainStep, state: TrainState) -> dict[str | None, list[TorchGroup]]:
    """Return the groups of each of torch's optimizers: one, by the label None; or one by label, if classes differ.

    Raises:
        TypeError: a class is not torch.optim's, so that torch's format may not hold its state; and as `groups_of`.
    """
    groups = groups_of(call, step, state)
    for group in groups:
        if not isinstance(group.optimizer, RuleOptimizer):
            raise TypeError(
                f"{call}: the step's optimizer must be of a class of torch.optim; got {group.optimizer!r}: save and "
                "load with step.state_dict and step.load_state_dict; a module's values are "
                "loss_fn.state_dict(state.params, state.buffers)"
            )
    if len({group.optimizer.cls for group in groups}) == 1:
        return {None: groups}
    return {group.label: [group] for group in groups}


# To torch.


def to_torch(step: TrainStep, state: TrainState) -> StateDict:
    """Return the state_dicts of `TrainStep.to_torch`."""
    call = "to_torch"
    state = gather(call, state)
    check_params(call, state.params, step.loss_fn.param_shapes)
    saved = export(call, state)
    optimizers: dict[str | None, StateDict] = {}
    for label, groups in _torch_optimizers(call, step, state).items():
        _check_entries(call, groups, saved)
        optimizers[label] = _optimizer_state_dict(groups, saved)
    return {
        "model": step.loss_fn.state_dict(state.params, state.buffers),
        "optimizer": optimizers.get(None, optimizers),
        "scaler": to_state_dict(state.scaler, step.config),
    }


def _check_entries(call: str, groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a state has other entries than the optimizer keeps, which another one made."""
    for group in groups:
        expected = {f"{group.prefix}applied"}
        for name in group.names:
            if (param := saved.get(f"params.{name}")) is not None:
                entries = group.optimizer.entry_names[param.dim() >= 2]
                expected |= {group.key(entry, name) for entry in entries}
        found = {name for name in saved if name in expected or name.startswith(f"{group.prefix}state.")}
        if odd := expected ^ found:
            raise ValueError(
                f"{call}: state must be one of this step, with the entries that {group.optimizer!r} keeps; odd is "
                f"{min(odd)!r}"
            )


def _optimizer_state_dict(groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]) -> StateDict:
    """Return the state_dict of one torch optimizer."""
    states: dict[int, StateDict] = {}
    param_groups: list[StateDict] = []
    number = 0
    for group in groups:
        numbers: list[int] = []
        for name in group.names:
            entries = group.entries_in(saved, name)
            # A parameter that no step has changed has no entries in torch, where the first step differs.
            is_unchanged = entries.pop(APPLIED_ENTRY, None) == 0
            if entries and not is_unchanged:
                states[number] = entries
            if "step" in entries:
                entries["step"] = entries["step"].cpu()  # torch stores the step counter on the host
            numbers.append(number)
            number += 1
        hyperparameters = hyperparameters_of(group.optimizer, saved[f"{group.prefix}applied"])
        param_groups.append({**hyperparameters, "params": numbers})
    return {"state": states, "param_groups": param_groups}


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
    if steps is not None:
        integer(call, "steps", steps, 0)
    if scaler is not None:
        like = like._replace(scaler=_scaler_state(call, step, scaler, like.scaler))
    saved = export(call, like)
    if optimizer is not None:
        groups_by_label = _torch_optimizers(call, step, like)
        state_dicts: Any = {None: optimizer} if None in groups_by_label else optimizer
        if not isinstance(state_dicts, Mapping) or state_dicts.keys() != groups_by_label.keys():
            labels = list(groups_by_label)
            raise ValueError(f"{call}: optimizer must have a state_dict for each of {labels}; got {list(optimizer)}")
        for label, groups in groups_by_label.items():
            _read_optimizer(call, state_dicts[label], groups, saved)
    if optimizer is not None or steps is not None:
        _read_counts(call, groups_of(call, step, like), steps, saved)
    return restore(call, saved, like, step.options.parallel)


def _read_optimizer(call: str, state_dict: StateDict, groups: Sequence[TorchGroup], saved: dict[str, Tensor]) -> None:
    """Write a torch optimizer's state among the exported tensors.

    Raises:
        TypeError: it is no state_dict of an optimizer.
        ValueError: its parameters are not the step's, or its class or hyperparameters are others.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = _tree.brief(state_dict)
        raise TypeError(f"{call}: optimizer must be the state_dict() of a torch.optim.Optimizer; got {got}")
    numbers_and_groups = _numbers_and_groups(call, state_dict, groups, saved)
    for group in groups:
        for name in group.names:
            if f"params.{name}" in saved:  # frozen ones are in the module
                number, saved_group = numbers_and_groups[name]
                _check_hyperparameters(call, group.optimizer, saved_group, name)
                _write_entries(call, group, name, state_dict["state"].get(number, {}), saved)


def _numbers_and_groups(
    call: str, state_dict: StateDict, groups: Sequence[TorchGroup], saved: Mapping[str, Tensor]
) -> dict[str, tuple[int, StateDict]]:
    """Return the number of each parameter in a torch optimizer, and its group there, by name.

    The order is that of the names that torch saved, of an optimizer created with `named_parameters()`; else the
    module's, with or without its frozen parameters.

    Raises:
        ValueError: a parameter is missing, or without names the order is not known.
    """
    saved_params: list[tuple[int, StateDict]] = []
    saved_names: list[str] = []
    for saved_group in state_dict["param_groups"]:
        saved_params += [(number, saved_group) for number in saved_group["params"]]
        saved_names += saved_group.get("param_names", ())
    group_count = len(state_dict["param_groups"])
    own_names = [name for group in groups for name in group.names]
    trained_names = [name for name in own_names if f"params.{name}" in saved]
    orders = [saved_names]
    if not saved_names and group_count == len(groups):  # several groups have another order
        orders = [own_names, trained_names]
    for names in orders:
        if len(names) == len(saved_params) and set(trained_names) <= set(names):
            return dict(zip(names, saved_params))
    raise ValueError(
        f"{call}: optimizer must have the step's parameters; it has {len(saved_params)} in {group_count} groups, the "
        f"step {len(own_names)} in {len(groups)}, and its param_names are ({_tree.listed(saved_names)}): if they are "
        "the same in another order, write their names into it, group['param_names'] = [...] for each group of "
        "optimizer['param_groups']"
    )


def _check_hyperparameters(call: str, optimizer: RuleOptimizer, saved_group: Mapping[str, object], name: str) -> None:
    """Raise ValueError if a saved group has another number than the step would continue with."""
    for key, own_value in optimizer.constants.items():
        # Dynamic ones are tensors and schedules: the step goes on with its own.
        if key not in saved_group or key in optimizer.dynamic:
            continue
        value = saved_group[key]
        if _tree.leaves(value) != _tree.leaves(own_value):  # a list is a tuple here
            raise ValueError(
                f"{call}: optimizer must have the step's {key}, {own_value!r}; got {value!r} for {name!r}: make the "
                f"step with stateless(..., {key}={value!r}), or change it in optimizer['param_groups']"
            )


def _write_entries(
    call: str, group: TorchGroup, name: str, entries: Mapping[str, object], saved: dict[str, Tensor]
) -> None:
    """Write torch's state of a parameter among the exported tensors; raise ValueError if another class keeps it."""
    own_entries = group.entries_in(saved, name)
    # A class may save None for an entry that it does not use.
    values = {entry: value for entry, value in entries.items() if value is not None}
    # torch has no entries of a parameter that no step has changed, and no buffer where the momentum is 0.
    may_lack = {APPLIED_ENTRY, "momentum_buffer"} if values else own_entries.keys()
    if APPLIED_ENTRY in own_entries:
        values[APPLIED_ENTRY] = bool(values)
    missing = own_entries.keys() - values.keys() - may_lack
    unknown = values.keys() - own_entries.keys()
    if missing or unknown:
        raise ValueError(
            f"{call}: optimizer must be of the step's class, which keeps {sorted(own_entries)} for {name!r}; got "
            f"{sorted(values)}"
        )
    for entry, value in values.items():
        saved[group.key(entry, name)] = torch.as_tensor(value).to(own_entries[entry])


def _read_counts(call: str, groups: Sequence[TorchGroup], steps: int | None, saved: dict[str, Tensor]) -> None:
    """Write the counts of steps among the exported tensors: those given, or the largest of torch's.

    A parameter that was frozen for a while has a lower count than the run.

    Raises:
        ValueError: a hyperparameter follows a count of steps, which torch's optimizers do not have.
    """
    if steps is None:
        keys = [group.key("step", name) for group in groups for name in group.names]
        counts = [int(saved[key]) for key in keys if key in saved]
        hyperparameters = [dict(group.optimizer.hyperparameters) for group in groups]
        if not counts and any(map(callable, _tree.leaves(hyperparameters))):
            raise ValueError(
                f"{call}: steps must be given, the number of steps applied, as a schedule counts them and torch's "
                "optimizer does not"
            )
        steps = max(counts, default=0)
    numbers = {"step": steps, "skipped": 0, "consecutive_skips": 0}
    numbers |= {f"{group.prefix}applied": steps for group in groups}
    saved.update({key: torch.full_like(saved[key], number) for key, number in numbers.items()})


def _scaler_state(call: str, step: TrainStep, state_dict: StateDict, like: ScalerState) -> ScalerState:
    """Return the state of a torch scaler; raise ValueError if its constants are not the step's."""
    scaler_state, saved_config = from_state_dict(state_dict, step.config, device=like.scale.device)
    if saved_config != step.config:
        raise ValueError(
            f"{call}: scaler must have the constants of the step's {step.config}; got {saved_config}: make the step "
            "with this config"
        )
    return scaler_state
