"""torch's learning-rate schedulers for pure optimizers: run once, their values are a table of the applied steps."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from funcamp import _tree
from funcamp._check import integer, real
from funcamp._optim.arguments import torch_optimizer
from funcamp._optim.by_group import GroupedOptimizer
from funcamp._optim.hyperparameters import is_dynamic, map_items
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.table import Table

#: From torch's optimizer to its scheduler: what `schedule` gets.
_Make: TypeAlias = Callable[[torch.optim.Optimizer], Any]
#: The pure optimizer that is given, and the kind that is returned.
Pure = TypeVar("Pure", StatelessOptimizer, GroupedOptimizer)
#: Optimizers by label.
_Optimizers: TypeAlias = dict[str, StatelessOptimizer]


def schedule(optimizer: Pure, make: Callable[[torch.optim.Optimizer], Any], *, steps: int) -> Pure:
    """Return a pure optimizer whose hyperparameters follow one of torch's learning-rate schedulers.

    lr = values[min(applied, steps - 1)], where values[k] is what the scheduler sets in its k-th step, in float64. This
    is torch's loop in which `scheduler.step()` is called after every step that is not skipped. After the last value it
    stays at that value. Nothing reports this, because a report would read the count on the host.

    The scheduler runs once, in this call, on a torch optimizer with the same class and hyperparameters, and zeros for
    parameters. Every number that it changes becomes a schedule: lr; with OneCycleLR and CyclicLR also momentum or the
    first of betas. The others do not change. A resumed run continues at the count in its state. A scheduler that counts
    epochs must get numbers of steps instead. No step syncs; `init` or the first step copies the values to the device.

    Args:
        optimizer: the result of `stateless`; its lr is the rate from which the scheduler starts. Or the result of
            `by_group`: torch's optimizer has one parameter group for each of its optimizers, in the same order. If
            their classes differ, each has its own torch optimizer and its own scheduler, as in torch.
        make: a function from torch's optimizer to its scheduler, which is any class of torch.optim.lr_scheduler except
            ReduceLROnPlateau (SequentialLR and ChainedScheduler too), or any object whose `step()` needs no argument.
        steps: the number of values, an integer of 1 or more: as many as the run has steps. A value takes 8 bytes, and a
            few microseconds in this call.

    Returns:
        An optimizer of the same kind, which continues from any state of the given one. Its schedules return float64
        tensors of shape ().

    Raises:
        TypeError: optimizer is not made by `stateless` or `by_group`; make is not a function, or does not return a
            scheduler of the optimizer that it is given; the scheduler changes a hyperparameter that is already a tensor
            or a schedule, or sets one to something that is not a Python number; steps is not an integer.
        ValueError: steps is less than 1; the scheduler does not start at step 0; a value is not finite. What make and
            the scheduler's step raise is not changed: the step of a ReduceLROnPlateau needs an argument.

    Example:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> sgd = stateless(torch.optim.SGD, lr=0.5)
        >>> sgd = schedule(sgd, lambda optimizer: LinearLR(optimizer, 0.25, total_iters=3), steps=4)
        >>> params = {"w": torch.ones(2)}
        >>> opt_state, rates = sgd.init(params), []
        >>> for _ in range(4):
        ...     rates.append(sgd.learning_rate(opt_state).item())
        ...     params, opt_state = sgd.update(params, {"w": torch.zeros(2)}, opt_state)
        >>> rates
        [0.125, 0.25, 0.375, 0.5]

    References:
        torch/optim/lr_scheduler.py, PyTorch 2.11 to 2.15.
    """
    steps = integer("schedule", "steps", steps, 1)
    if not callable(make):
        raise TypeError(
            "schedule: make must be a function from torch's optimizer to its scheduler, such as "
            f"lambda optimizer: CosineAnnealingLR(optimizer, ...); got {_tree.brief(make)}"
        )
    if isinstance(optimizer, GroupedOptimizer):
        return GroupedOptimizer(_scheduled_groups(optimizer.optimizers, make, steps), optimizer.group)
    return _scheduled_groups({"optimizer": optimizer}, make, steps)["optimizer"]


def _scheduled_groups(optimizers: _Optimizers, make: _Make, steps: int) -> _Optimizers:
    """Return optimizers by label, scheduled.

    Raises:
        TypeError: one of them is not made by `stateless`.
    """
    for label, optimizer in optimizers.items():
        if not isinstance(optimizer, StatelessOptimizer):
            raise TypeError(
                f"schedule: {label} must be made by stateless, because a scheduler needs torch's parameter groups; "
                f"got {_tree.brief(optimizer)}: compute its rate from the count of steps in its state"
            )
    if len({optimizer.cls for optimizer in optimizers.values()}) == 1:
        return _scheduled(optimizers, make, steps)
    # In torch, too, groups of several classes are several optimizers, each with a scheduler.
    scheduled: _Optimizers = {}
    for label, optimizer in optimizers.items():
        scheduled |= _scheduled({label: optimizer}, make, steps)
    return scheduled


def _scheduled(optimizers: _Optimizers, make: _Make, steps: int) -> _Optimizers:
    """Return the optimizers with the values of one scheduler, which sees them as the groups of one torch optimizer."""
    with without_modes():
        torch_optimizer = _torch_optimizer(list(optimizers.values()))
        numbers_before = [dict(group) for group in torch_optimizer.param_groups]
        scheduler = _scheduler(make, torch_optimizer)
        values = _run(scheduler, torch_optimizer, numbers_before, steps)
    source = type(scheduler).__name__
    scheduled = {}
    for (label, optimizer), before, values_by_name in zip(optimizers.items(), numbers_before, values):
        changed = {}
        for name, values_of_name in values_by_name.items():
            if any(value != before[name] for value in values_of_name):
                given = optimizer.hyperparameters.get(name, before[name])
                changed[name] = map_items(functools.partial(_table, source, name), given, before[name], *values_of_name)
        scheduled[label] = optimizer
        if changed:  # making a class of another package takes its trial
            scheduled[label] = type(optimizer)(optimizer.cls, optimizer.hyperparameters | changed)
    return scheduled


def _torch_optimizer(optimizers: list[StatelessOptimizer]) -> torch.optim.Optimizer:
    """Return a torch optimizer with a group for each of some optimizers of one class; its step does nothing."""
    cls = optimizers[0].cls
    # Complete ones: a group that lacks a hyperparameter would get that of the first optimizer.
    groups = [torch_optimizer(cls, optimizer.arguments).param_groups[0] for optimizer in optimizers]
    made: torch.optim.Optimizer = cls(groups, **optimizers[0].arguments)
    return made


def _scheduler(make: _Make, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that `make` returns.

    Raises:
        TypeError: it is no scheduler of the optimizer.
        ValueError: it has taken steps.
    """
    scheduler = make(optimizer)
    has_step = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, (type, torch.optim.Optimizer))
    if not has_step or getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise TypeError(
            "schedule: make must return a scheduler of the optimizer that it is given (SequentialLR and "
            f"ChainedScheduler combine several); got {_tree.brief(scheduler)}"
        )
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):  # of SequentialLR and ChainedScheduler
        if getattr(each, "last_epoch", 0) > 0:
            raise ValueError(
                "schedule: make must return a scheduler that starts at step 0, because a resumed run continues at the "
                f"count in its state; got a {type(each).__name__} with last_epoch={each.last_epoch}: leave last_epoch "
                "out"
            )
    return scheduler


def _run(
    scheduler: Any, optimizer: torch.optim.Optimizer, numbers_before: list[dict[str, Any]], steps: int
) -> list[dict[str, list[Any]]]:
    """Return for each group, by name, what is set after 0, 1, 2, ... steps of the scheduler."""
    values: list[dict[str, list[Any]]] = []
    for before in numbers_before:
        values.append({name: [] for name in before if name != "params"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # no optimizer steps here
        for count in range(steps):
            if count > 0:
                scheduler.step()
            for group, values_by_name in zip(optimizer.param_groups, values):
                for name, values_of_name in values_by_name.items():
                    values_of_name.append(group[name])
    return values


def _table(source: str, name: str, hyperparameter: Any, before: object, *values: object) -> object:
    """Return a table for a number that changes; any other hyperparameter as it is.

    Args:
        source: the scheduler's class, for messages and the table's repr.
        name: the hyperparameter's name; of an item of a tuple with its index.
        hyperparameter: what `stateless` got.
        before: its number before the scheduler was made, an example if it is a tensor or a schedule.
        *values: what the scheduler sets, one for each step.

    Raises:
        TypeError: the scheduler changes a tensor or a schedule, or sets what is no number.
        ValueError: a value is not finite.
    """
    if all(value == before for value in values):
        return hyperparameter
    if is_dynamic(hyperparameter):
        raise TypeError(
            f"schedule: optimizer must have a number as {name}, because {source} sets it; got "
            f"{_tree.brief(hyperparameter)}: give stateless the number from which the scheduler starts"
        )
    numbers = [real("schedule", f"{name} of {source}", value) for value in values]
    for count, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"schedule: {name} of {source} must be finite; got {number} after {count} steps")
    return Table(numbers, source)
