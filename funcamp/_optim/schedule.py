"""torch's learning-rate schedulers for pure optimizers: run once, their values are a table of the applied steps."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from funcamp import _tree
from funcamp._check import integer, real
from funcamp._optim.arguments import torch_optimizer
from funcamp._optim.hyperparameters import is_dynamic, map_items
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.table import Table
from funcamp._types import Kwargs


def schedule(
    optimizer: StatelessOptimizer, make: Callable[[torch.optim.Optimizer], Any], *, steps: int
) -> StatelessOptimizer:
    """Return a pure optimizer whose hyperparameters follow one of torch's learning-rate schedulers.

    lr = values[min(applied, steps - 1)], where values[k] is what the scheduler sets in its k-th step, in float64. This
    is torch's loop in which `scheduler.step()` is called after every step that is not skipped. After the last value it
    stays at that value. Nothing reports this, because a report would read the count on the host.

    The scheduler runs once, in this call, on a torch optimizer with the same class and hyperparameters, and zeros for
    parameters. Every number that it changes becomes a schedule: lr; with OneCycleLR and CyclicLR also momentum or the
    first of betas. The others do not change. A resumed run continues at the count in its state. A scheduler that counts
    epochs must get numbers of steps instead. No step syncs; `init` or the first step copies the values to the device.

    Args:
        optimizer: the result of `stateless`; its lr is the rate from which the scheduler starts. Of `by_group` each
            optimizer is scheduled by itself.
        make: a function from torch's optimizer to its scheduler, which is any class of torch.optim.lr_scheduler except
            ReduceLROnPlateau (SequentialLR and ChainedScheduler too), or any object that has the optimizer as
            `optimizer` and whose `step()` needs no argument.
        steps: the number of values, an integer of 1 or more: as many as the run has steps. A value takes 8 bytes, and a
            few microseconds in this call.

    Returns:
        An optimizer that continues from any state of the given one. Its schedules return float64 tensors of shape ().

    Raises:
        TypeError: optimizer is not made by `stateless`; make is not a function, or does not return a
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
    if not isinstance(optimizer, StatelessOptimizer):
        raise TypeError(
            "schedule: optimizer must be made by stateless, because a scheduler needs torch's parameter group; got "
            f"{_tree.brief(optimizer)}: schedule each optimizer of by_group by itself, or compute the rate from the "
            "count of steps in the state"
        )
    with without_modes():
        of_torch = torch_optimizer(optimizer.cls, optimizer.arguments)
        group = of_torch.param_groups[0]
        before = dict(group)
        scheduler = _scheduler(make, of_torch)
        values = _run(scheduler, group, before.keys() - {"params"}, steps)
    changed = {}
    for name, values_of_name in values.items():
        if any(value != before[name] for value in values_of_name):
            table = functools.partial(_table, type(scheduler).__name__, name)
            given = optimizer.hyperparameters.get(name, before[name])
            changed[name] = map_items(table, given, before[name], *values_of_name)
    return type(optimizer)(optimizer.cls, optimizer.hyperparameters | changed)


def _scheduler(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that `make` returns.

    Raises:
        TypeError: it is no scheduler of the optimizer.
        ValueError: it has taken steps.
    """
    scheduler = make(optimizer)
    if getattr(scheduler, "optimizer", None) is not optimizer:
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


def _run(scheduler: Any, group: Kwargs, names: set[str], steps: int) -> dict[str, list[Any]]:
    """Return by name what is set in a parameter group after 0, 1, 2, ... steps of its scheduler."""
    values: dict[str, list[Any]] = {name: [] for name in sorted(names)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # no optimizer steps here
        for count in range(steps):
            if count > 0:
                scheduler.step()
            for name, values_of_name in values.items():
                values_of_name.append(group[name])
    return values


def _table(source: str, name: str, hyperparameter: Any, before: object, *values: object) -> object:
    """Return a table for a number that changes; any other hyperparameter as it is.

    Args:
        source: the scheduler's class, for messages and the table's repr.
        name: the hyperparameter's name.
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
