"""The state that continues a torch loop, from the state_dicts of its optimizer and its scaler.

torch's tensors get the names under which `state_dict` exports those of a state. Only `names_by_number`
maps the numbers of torch's parameters to names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.chain import only_optimizer_of
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.state_dict import from_state_dict
from funcamp._step.state import TrainState, check_train_state
from funcamp._step.state_dict import export, restore
from funcamp._step.torch_groups import Step, TorchGroup, as_number, groups_of, has_several_classes, torch_group_of
from funcamp._types import StateDict

#: Entries of a torch group that do not affect the result: how the class runs, and what a scheduler stores there.
_WITHOUT_EFFECT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr")
#: The constants of a configuration that torch's scaler has, too.
_SCALER_CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval")


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
        counts: dict[str, int] = {}
        for label in _labels_of_optimizers(call, only_optimizer_of(step.optimizer), optimizer):
            state_dict = optimizer if label is None else optimizer[label]
            _check_state_dict(call, state_dict)
            groups_of_optimizer = [group for group in groups if label is None or group.label == label]
            entries = _read_optimizer(call, state_dict, groups_of_optimizer, saved, names_are_given=names is not None)
            saved.update(entries.tensors)
            counts.update(entries.counts)
        if steps is None and not counts:
            _refuse_schedules(call, groups)
        saved.update(_counts(groups, counts, steps, saved))
    if scaler is not None:
        saved.update(_read_scaler(call, step.config, scaler, like.scaler.scale.device))
    return restore(saved, like, split=step._split)


def _labels_of_optimizers(call: str, optimizer: Any, state_dicts: Mapping[str, object]) -> list[str | None]:
    """Return the labels under which torch's optimizers have their state_dicts; [None] for one optimizer.

    Raises:
        ValueError: there are several optimizers, and not a state_dict for each.
    """
    if not has_several_classes(optimizer):
        return [None]
    labels: list[str | None] = list(optimizer.optimizers)
    if not isinstance(state_dicts, Mapping) or set(state_dicts) != set(labels):
        raise ValueError(f"{call}: optimizer must have a state_dict for each of {labels}; got {list(state_dicts)}")
    return labels


def _check_state_dict(call: str, state_dict: object) -> None:
    if isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys():
        return
    got = _tree.brief(state_dict)
    raise TypeError(f"{call}: optimizer must be the state_dict() of a torch.optim.Optimizer; got {got}")


class _Entries(NamedTuple):
    """What a torch optimizer's state becomes."""

    tensors: dict[str, Tensor]
    """By exported name."""
    counts: dict[str, int]
    """The number of applied steps by the prefix of a group, if torch's class counts them."""


def _read_optimizer(
    call: str,
    state_dict: Mapping[str, Any],
    groups: Sequence[TorchGroup],
    saved: Mapping[str, Tensor],
    *,
    names_are_given: bool,
) -> _Entries:
    """Return a torch optimizer's state by exported names.

    Raises:
        ValueError: its parameters are not the step's, or its class or hyperparameters are others.
    """
    torch_groups = {number: group for group in state_dict["param_groups"] for number in group["params"]}
    groups_by_name = {name: group for group in groups for name in group.names}
    entry_names = {group.prefix: group.entries_in(saved) for group in groups}
    tensors: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    checked_groups: set[tuple[str, int]] = set()

    def count_at_least(group: TorchGroup, count: int) -> None:
        """Raise the count of a group: a parameter that was frozen for a while has a lower count than its group."""
        counts[group.prefix] = max(counts.get(group.prefix, 0), count)

    names = names_by_number(call, state_dict, groups, saved, names_are_given=names_are_given)
    for number, name in names.items():
        if name not in groups_by_name:
            raise ValueError(f"{call}: names must be of the step's parameters; got {name!r}")
        if not _is_trained(name, saved):
            continue
        group = groups_by_name[name]
        torch_group = torch_groups[number]
        # Once for all parameters of two groups, because the check makes an optimizer of torch's class.
        both_groups = (group.prefix, id(torch_group))
        if both_groups not in checked_groups:
            checked_groups.add(both_groups)
            shared = _read_shared(call, group, torch_group, saved)
            tensors.update(shared)
            _check_hyperparameters(call, group, torch_group, name, saved)
            step_count = shared.get(group.key_of_shared("step"))
            if step_count is not None:
                count_at_least(group, int(step_count))
        entries = state_dict["state"].get(number, {})
        known = entry_names[group.prefix]
        tensors.update(_read_parameter(call, group, known, name, entries, saved))
        if "step" in known:
            count_at_least(group, int(entries.get("step") or 0))
    return _Entries(tensors, counts)


def _read_shared(
    call: str, group: TorchGroup, torch_group: Mapping[str, Any], saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what torch's class keeps in a parameter group besides hyperparameters, by exported names.

    Raises:
        ValueError: the group lacks it.
    """
    tensors: dict[str, Tensor] = {}
    for entry in group.shared_in(saved):
        key = group.key_of_shared(entry)
        if entry not in torch_group:
            raise ValueError(f"{call}: optimizer must have taken a step, which puts {entry!r} into its parameter group")
        tensors[key] = torch.as_tensor(torch_group[entry]).to(saved[key].device, saved[key].dtype)
    applied_key = group.key_of_shared(APPLIED_ENTRY)
    if applied_key in saved:  # the group has what a first step puts there
        tensors[applied_key] = torch.ones_like(saved[applied_key])
    return tensors


def _read_parameter(
    call: str,
    group: TorchGroup,
    known: Sequence[str],
    name: str,
    entries: Mapping[str, object],
    saved: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return torch's state of one parameter by exported names.

    Args:
        call: the public function, for errors.
        group: the parameter's group.
        known: the entries that the step's optimizer has.
        name: the parameter's name.
        entries: torch's state of the parameter.
        saved: tensors of the same names, for dtype and device.

    Raises:
        ValueError: torch's class has other entries.
    """
    # A class may save None for an entry that it does not use.
    values = {entry: value for entry, value in entries.items() if value is not None}
    if APPLIED_ENTRY in known:
        # torch has no entries of a parameter that no step has changed.
        values[APPLIED_ENTRY] = 1 if values else 0
    tensors: dict[str, Tensor] = {}
    for entry, value in values.items():
        key = group.key(entry, name)
        if key not in saved:
            raise ValueError(
                f"{call}: optimizer must be of the step's class, which keeps {known} for {name!r}; got {entry!r}"
            )
        tensors[key] = torch.as_tensor(value).to(saved[key].device, saved[key].dtype)
    return tensors


def names_by_number(
    call: str,
    state_dict: Mapping[str, Any],
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
    torch_groups = state_dict["param_groups"]
    numbers: list[int] = []
    saved_names: list[str] = []
    for torch_group in torch_groups:
        numbers += torch_group["params"]
        saved_names += torch_group.get("param_names") or ()
    names = [name for group in groups for name in group.names]
    has_saved_names = bool(saved_names)
    if not names_are_given:
        if len(saved_names) == len(numbers):
            names = saved_names
        elif len(names) != len(numbers):
            # torch's optimizer got only the trainable parameters.
            names = [name for name in names if _is_trained(name, saved)]
    # Parameters of several groups are not in the module's order.
    is_known_order = names_are_given or has_saved_names or len(torch_groups) == len(groups)
    if len(names) != len(numbers) or not is_known_order:
        raise ValueError(
            f"{call}: names must be given, the names of all parameters in the order in which torch's optimizer was "
            f"given them; it has {len(numbers)} in {len(torch_groups)} groups, the step {len(names)} in {len(groups)}"
        )
    return dict(zip(numbers, names))


def _is_trained(name: str, saved: Mapping[str, Tensor]) -> bool:
    """Return whether the state has a parameter; frozen ones are only in the module."""
    return f"params.{name}" in saved


def _refuse_schedules(call: str, groups: Iterable[TorchGroup]) -> None:
    """Raise ValueError if a hyperparameter follows a count of steps, which torch's optimizers do not have."""
    for group in groups:
        if _has_schedule(group.optimizer._hyperparameters.values()):
            raise ValueError(
                f"{call}: steps must be given, the number of steps applied, as a schedule counts them and torch's "
                f"{group.optimizer._cls.__name__} does not"
            )


def _has_schedule(values: Iterable[object]) -> bool:
    for value in values:
        if isinstance(value, (tuple, list)):
            if _has_schedule(value):
                return True
        elif callable(value):
            return True
    return False


def _counts(
    groups: Iterable[TorchGroup], counts: Mapping[str, int], steps: int | None, saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the counts of a state, by exported name.

    Args:
        groups: the groups.
        counts: the numbers of applied steps that torch's optimizers have, by the prefix of a group.
        steps: the number that the caller gave, which counts for all.
        saved: tensors of the same names, for dtype and device.
    """
    applied = max(counts.values(), default=0) if steps is None else steps
    numbers = {"step": applied, "skipped": 0, "consecutive_skips": 0}
    for group in groups:
        numbers[f"{group.prefix}applied"] = counts.get(group.prefix, applied) if steps is None else steps
    return {key: torch.full_like(saved[key], number) for key, number in numbers.items()}


def _read_scaler(call: str, config: ScalerConfig, state_dict: StateDict, device: torch.device) -> dict[str, Tensor]:
    """Return the state of a torch scaler by exported names.

    Raises:
        ValueError: its constants are not the step's.
    """
    scaler_state, saved_config = from_state_dict(state_dict, config, device=device)
    for name in _SCALER_CONSTANTS:
        own_value = getattr(config, name)
        value = getattr(saved_config, name)
        if own_value != value:
            raise ValueError(
                f"{call}: scaler must have the step's {name}, {own_value}; got {value}: make the step with "
                f"ScalerConfig({name}={value})"
            )
    return {f"scaler.{name}": value for name, value in scaler_state._asdict().items()}


def _check_hyperparameters(
    call: str, group: TorchGroup, torch_group: Mapping[str, object], name: str, saved: Iterable[str]
) -> None:
    """Raise ValueError if torch's group has another number than the step would continue with."""
    optimizer = group.optimizer
    # Dynamic ones are tensors and schedules: the step goes on with its own.
    ignored = (*_WITHOUT_EFFECT, *optimizer._dynamic, *group.shared_in(saved))
    for key, own_value in torch_group_of(optimizer, optimizer._arguments).items():
        if key not in torch_group or key in ignored:
            continue
        value = as_number(torch_group[key])
        if value != as_number(own_value):
            raise ValueError(
                f"{call}: optimizer must have the step's {key}, {own_value!r}; got {value!r} for {name!r}: make the "
                f"step with stateless(..., {key}={value!r}), or change it in optimizer['param_groups']"
            )
