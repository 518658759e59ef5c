"""Conversion of a training state to and from the state_dicts of a torch loop.

Both directions rename the tensors that `state_dict` exports: torch numbers parameters in the order in which the
optimizer got them; funcamp uses their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.stateless import APPLIED, StatelessOptimizer
from funcamp._scaler.state_dict import from_state_dict, to_state_dict
from funcamp._step.state import TrainState, check_train_state, export, gathered, restore

#: Entries of a torch group that do not affect the result: how the class runs, and what a scheduler stores there.
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr")


class Part(NamedTuple):
    """One parameter group of torch's optimizer."""

    label: str | None
    optimizer: StatelessOptimizer
    prefix: str
    """The prefix of its entries among the exported names."""
    names: list[str]
    """The names of its parameters, in torch's order."""

    def entry(self, entry: str, name: str) -> str:
        """Return the exported name of an optimizer entry of a parameter."""
        return f"{self.prefix}state.{entry}.{name}"


def to_torch(step: Any, state: TrainState, names: Iterable[str] | None) -> dict[str, Any]:
    """Return the state_dicts of `TrainStep.to_torch`."""
    saved, several = export("to_torch", state), _several(step.optimizer)
    found: dict[str | None, dict[str, Any]] = {}
    for part in parts_of("to_torch", step, state, names):
        one = found.setdefault(part.label if several else None, {"state": {}, "param_groups": []})
        first = sum(len(group["params"]) for group in one["param_groups"])
        numbers = dict(enumerate(part.names, first))
        one["param_groups"].append(
            hyperparameters_of(part.optimizer, saved[f"{part.prefix}applied"]) | {"params": list(numbers)}
        )
        kept = _entries(saved, part.prefix)
        for number, name in numbers.items():
            entries = {entry: saved[part.entry(entry, name)] for entry in kept if part.entry(entry, name) in saved}
            if entries and entries.pop(APPLIED, 1) != 0:  # torch stores the step counter on the host
                one["state"][number] = {entry: v.cpu() if entry == "step" else v for entry, v in entries.items()}
    params, scaler = gathered("to_torch", state).params, to_state_dict(state.scaler, step.config)
    if isinstance(step.loss_fn, ModuleLoss):
        model = step.loss_fn.state_dict(params, state.buffers)
    else:
        model = {name.partition(".")[2]: saved[name] for name in saved if name.startswith(("params.", "buffers."))}
    return {"model": model, "optimizer": found if several else found[None], "scaler": scaler}


def from_torch(
    step: Any,
    like: TrainState,
    optimizer: Mapping[Any, Any] | None,
    scaler: dict[str, Any] | None,
    names: Iterable[str] | None,
    steps: int | None,
) -> TrainState:
    """Return the state of `TrainStep.from_torch`."""
    call = "from_torch"
    check_train_state(call, "like", like)
    saved = export(call, like)
    if optimizer is not None:
        parts, labels = parts_of(call, step, like, names), [None]
        if _several(step.optimizer):
            labels = list(step.optimizer.optimizers)
            if not isinstance(optimizer, Mapping) or set(optimizer) != set(labels):
                raise ValueError(
                    f"{call}: optimizer must have a state_dict for each of {labels}; got {list(optimizer)}"
                )
        counts: dict[str, int] = {}
        for label in labels:
            given = optimizer if label is None else optimizer[label]
            if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
                got = _tree.brief_or_class(given)
                raise TypeError(f"{call}: optimizer must be a state_dict of a torch.optim.Optimizer; got {got}")
            mine = [part for part in parts if label in (None, part.label)]
            counts |= _take(call, given, mine, names is not None, saved)
        for part in parts:
            if steps is None and not counts and _has_schedule(part.optimizer._hyperparameters.values()):
                raise ValueError(
                    f"{call}: steps must be given, the number of steps applied, as a schedule counts them and torch's "
                    f"{part.optimizer._cls.__name__} does not"
                )
        applied = max(counts.values(), default=0) if steps is None else steps
        numbers = {"step": applied, "skipped": 0, "consecutive_skips": 0}
        numbers |= {f"{p.prefix}applied": counts.get(p.prefix, applied) if steps is None else steps for p in parts}
        saved |= {name: torch.full_like(saved[name], number) for name, number in numbers.items()}
    if scaler is not None:
        held, config = from_state_dict(scaler, step.config, device=like.scaler.scale.device)
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            own, value = getattr(step.config, name), getattr(config, name)
            if own != value:
                raise ValueError(
                    f"{call}: scaler must have the step's {name}, {own}; got {value}: make the step with "
                    f"ScalerConfig({name}={value})"
                )
        saved |= {f"scaler.{name}": value for name, value in held._asdict().items()}
    return restore(saved, like, split=step._split)


def _take(
    call: str, given: Mapping[str, Any], parts: list[Part], named: bool, saved: dict[str, Tensor]
) -> dict[str, int]:
    """Write a torch optimizer's state into the exported tensors; return the step count of each part."""
    groups = given["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    order = [name for part in parts for name in part.names]
    own = [name for group in groups for name in group.get("param_names") or ()]
    if not named and len(own) == len(numbers):
        order = own
    elif not named and len(order) != len(numbers):  # torch's optimizer got only the trainable parameters
        order = [name for name in order if f"params.{name}" in saved]
    if len(order) != len(numbers) or (not named and not own and len(groups) != len(parts)):
        raise ValueError(
            f"{call}: names must be given, the names of all parameters in the order in which torch's optimizer was "
            f"given them; it has {len(numbers)} in {len(groups)} groups, the step {len(order)} in {len(parts)}"
        )
    group_of = {number: group for group in groups for number in group["params"]}
    part_of = {name: part for part in parts for name in part.names}
    counts: dict[str, int] = {}
    for number, name in zip(numbers, order):
        if name not in part_of:
            raise ValueError(f"{call}: names must be of the step's parameters; got {name!r}")
        if f"params.{name}" not in saved:  # frozen
            continue
        part = part_of[name]
        _check_group(call, part.optimizer, group_of[number], name)
        entries = {entry: value for entry, value in given["state"].get(number, {}).items() if value is not None}
        kept = _entries(saved, part.prefix)
        if APPLIED in kept:
            entries = {APPLIED: 1, **entries} if entries else {APPLIED: 0}
        for entry, value in entries.items():
            if part.entry(entry, name) not in saved:
                raise ValueError(
                    f"{call}: optimizer must be of the step's class, which keeps {kept} for {name!r}; got {entry!r}"
                )
            like = saved[part.entry(entry, name)]
            saved[part.entry(entry, name)] = torch.as_tensor(value).to(like.device, like.dtype)
        if "step" in kept:
            counts[part.prefix] = max(counts.get(part.prefix, 0), int(entries.get("step", 0)))
    return counts


def parts_of(call: str, step: Any, state: TrainState, names: Iterable[str] | None) -> list[Part]:
    params, grouped = state.params, isinstance(step.optimizer, GroupedOptimizer)
    group = step.optimizer.group if grouped else lambda *_: None
    leaves: dict[str, Any] = dict(params.layout.label_of())
    frozen: dict[str, Any] = {}
    if isinstance(step.loss_fn, ModuleLoss):
        frozen = dict(step.loss_fn.model.named_parameters())
    order = list(names) if names is not None else list(frozen) if frozen else list(leaves)
    if len(set(order)) < len(order) or not set(leaves) <= set(order) <= {*leaves, *frozen}:
        odd = sorted(set(leaves) ^ set(order))
        raise ValueError(f"{call}: names must be those of the step's parameters, each once; got {order}, odd is {odd}")
    labels = {n: leaves[n] if n in leaves else group(n, frozen[n]) for n in order} if grouped else {}
    parts = []
    for label, optimizer in (step.optimizer.optimizers if grouped else {None: step.optimizer}).items():
        if not isinstance(optimizer, StatelessOptimizer):
            raise TypeError(f"{call}: the step's optimizer must be made by stateless; got {optimizer!r}")
        prefix = "opt_state." if label is None else f"opt_state.{label}."
        parts.append(Part(label, optimizer, prefix, [name for name in order if labels.get(name) == label]))
    return parts


def _several(optimizer: Any) -> bool:
    """Return whether torch needs one optimizer per group, because their classes differ."""
    return isinstance(optimizer, GroupedOptimizer) and len({one._cls for one in optimizer.optimizers.values()}) > 1


def _entries(saved: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Return the names of an optimizer's entries, as in torch."""
    start = f"{prefix}state."
    return list(dict.fromkeys(name[len(start) :].partition(".")[0] for name in saved if name.startswith(start)))


def hyperparameters_of(optimizer: StatelessOptimizer, applied: Tensor) -> dict[str, Any]:
    """Return the numbers of a torch.optim group after some applied steps."""
    numbers = optimizer._hyperparameters | optimizer._hyper(applied, [applied])
    made = optimizer._cls([torch.zeros(2, 2)], **{name: _plain(value) for name, value in numbers.items()})
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def _check_group(call: str, optimizer: StatelessOptimizer, group: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if torch's group has another number than the step would continue with."""
    made = optimizer._cls([torch.zeros(2, 2)], **optimizer._traits.arguments).param_groups[0]
    for key, own in made.items():
        if key in group and key not in (*_HOW, *optimizer._traits.dynamic) and _plain(group[key]) != _plain(own):
            value = _plain(group[key])
            raise ValueError(
                f"{call}: optimizer must have the step's {key}, {own!r}; got {value!r} for {name!r}: make the step "
                f"with stateless(..., {key}={value!r}), or change it in optimizer['param_groups']"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


def _has_schedule(values: Iterable[Any]) -> bool:
    return any(_has_schedule(v) if isinstance(v, (tuple, list)) else callable(v) for v in values)
