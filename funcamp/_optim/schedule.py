"""torch's learning-rate schedulers for pure optimizers: run once, their values are a table of the applied steps."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from funcamp import _tree
from funcamp._check import integer
from funcamp._optim.by_group import GroupedOptimizer, check_optimizer
from funcamp._optim.hyperparameters import is_dynamic
from funcamp._optim.modes import without_modes
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.table import Table

#: From torch's optimizer to its scheduler: what `schedule` gets.
_Make: TypeAlias = Callable[[torch.optim.Optimizer], Any]
#: The pure optimizer that is given, and the kind that is returned.
Pure = TypeVar("Pure", StatelessOptimizer, GroupedOptimizer)


class _Scheduler(Protocol):
    """A scheduler whose step needs no argument."""

    def step(self) -> object:
        """Set the numbers of the next step."""
        ...


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
            scheduler whose step needs no argument; the scheduler changes a hyperparameter that is already a tensor or a
            schedule, or sets one to something that is not a Python number; steps is not an integer.
        ValueError: steps is less than 1, or more than the scheduler can take; make raises an exception; its scheduler
            belongs to another optimizer, or does not start at step 0; a value is not finite.

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
    check_optimizer("schedule", "optimizer", optimizer)
    if not callable(make):
        scheduler_class = type(make).__name__ if hasattr(make, "step") else "CosineAnnealingLR"
        raise TypeError(
            "schedule: make must be a function that makes a scheduler for the optimizer that it is given, such as "
            f"lambda optimizer: {scheduler_class}(optimizer, ...); "
            f"got {_tree.brief(make)}"
        )
    steps = integer("schedule", "steps", steps, 1)
    if isinstance(optimizer, GroupedOptimizer):
        return GroupedOptimizer(_scheduled_groups(optimizer, make, steps), optimizer.group)
    return _scheduled({"": _checked("optimizer", optimizer)}, make, steps)[""]


def _scheduled_groups(grouped: GroupedOptimizer, make: _Make, steps: int) -> dict[str, StatelessOptimizer]:
    """Return the optimizers of groups by label, scheduled."""
    optimizers = {label: _checked(f"optimizer {label!r}", group) for label, group in grouped.optimizers.items()}
    classes = {optimizer._cls for optimizer in optimizers.values()}
    if len(classes) == 1:
        return _scheduled(optimizers, make, steps)
    # In torch, too, groups of several classes are several optimizers, each with a scheduler.
    scheduled: dict[str, StatelessOptimizer] = {}
    for label, optimizer in optimizers.items():
        scheduled |= _scheduled({label: optimizer}, make, steps)
    return scheduled


def _checked(name: str, optimizer: object) -> StatelessOptimizer:
    """Return an optimizer if `stateless` made it; raise TypeError otherwise."""
    if not isinstance(optimizer, StatelessOptimizer):
        raise TypeError(
            f"schedule: {name} must be made by stateless, because a scheduler needs torch's parameter groups; "
            f"got {_tree.brief(optimizer)}: compute its rate from the count of steps in its state"
        )
    return optimizer


def _scheduled(optimizers: Mapping[str, StatelessOptimizer], make: _Make, steps: int) -> dict[str, StatelessOptimizer]:
    """Return the optimizers with the values of one scheduler, which sees them as the groups of one torch optimizer."""
    with without_modes():
        torch_optimizer = _torch_optimizer(list(optimizers.values()))
        first_numbers = []
        for group in torch_optimizer.param_groups:
            first_numbers.append({name: value for name, value in group.items() if name != "params"})
        scheduler = _scheduler(make, torch_optimizer)
        scheduled_values = _run(scheduler, torch_optimizer, first_numbers, steps)
    scheduled = {}
    for (label, optimizer), group_numbers, values_by_name in zip(optimizers.items(), first_numbers, scheduled_values):
        if not values_by_name:
            scheduled[label] = optimizer
            continue
        hyperparameters = dict(optimizer._hyperparameters)
        for name, values in values_by_name.items():
            hyperparameter = hyperparameters.get(name, group_numbers[name])
            source = type(scheduler).__name__
            hyperparameters[name] = _with_tables(hyperparameter, group_numbers[name], name, values, source)
        scheduled[label] = type(optimizer)(optimizer._cls, hyperparameters)
    return scheduled


def _torch_optimizer(optimizers: list[StatelessOptimizer]) -> torch.optim.Optimizer:
    """Return a torch optimizer with a group for each of some optimizers of one class; its step does nothing."""
    cls = optimizers[0]._cls
    groups = []
    for optimizer in optimizers:
        # From an instance: a group that lacks a hyperparameter would get that of the first optimizer.
        (group,) = cls([torch.zeros(2, 2, requires_grad=True)], **optimizer._arguments).param_groups
        groups.append(group)
    idle_cls = type(cls.__name__, (cls,), {"step": _do_nothing, "__module__": cls.__module__})
    idle_optimizer: torch.optim.Optimizer = idle_cls(groups, **optimizers[0]._arguments)
    return idle_optimizer


def _do_nothing(_: object, closure: object = None) -> None:
    """Take the place of an optimizer's step."""


def _scheduler(make: _Make, optimizer: torch.optim.Optimizer) -> _Scheduler:
    """Return the scheduler that `make` returns, which must be a fresh one of the optimizer.

    Raises:
        TypeError: it is no scheduler, or its step needs an argument.
        ValueError: make raises, or the scheduler is another optimizer's, or has taken steps.
    """
    try:
        scheduler: _Scheduler = make(optimizer)
    except Exception as error:
        fix = ""
        if "initial_lr" in str(error):
            fix = ": leave last_epoch out, because a resumed run continues at the count in its state"
        raise ValueError(
            "schedule: make must return a scheduler of the optimizer that it is given; it raised "
            f"{type(error).__name__}: {_first_line(error)}{fix}"
        ) from error
    scheduler_class = type(scheduler).__name__
    if isinstance(scheduler, (type, torch.optim.Optimizer)) or not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            "schedule: make must return a scheduler, one object with a method step (SequentialLR and ChainedScheduler "
            f"combine several); got {_tree.brief(scheduler)}"
        )
    required = _required_parameters(scheduler.step)
    if required:
        raise TypeError(
            "schedule: make must return a scheduler whose step needs no argument, because its values are computed "
            f"before training; got a {scheduler_class}, whose step needs {', '.join(required)}: give stateless "
            "lr=torch.tensor(...) of shape (), and fill_ it between steps"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "schedule: make must return a scheduler of the optimizer that it is given; got one of another optimizer: "
            f"write lambda optimizer: {scheduler_class}(optimizer, ...)"
        )
    inner_schedulers = getattr(scheduler, "_schedulers", ())  # of SequentialLR and ChainedScheduler
    for each_scheduler in (scheduler, *inner_schedulers):
        epoch = getattr(each_scheduler, "last_epoch", 0)
        if isinstance(epoch, int) and epoch > 0:
            raise ValueError(
                "schedule: make must return a scheduler that starts at step 0, because a resumed run continues at the "
                f"count in its state; got a {type(each_scheduler).__name__} with last_epoch={epoch}: leave last_epoch "
                "out"
            )
    return scheduler


def _required_parameters(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that a function must get."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            names.append(name)
    return names


#: For every parameter group, the values of each hyperparameter that changes, by name.
_ScheduledValues: TypeAlias = list[dict[str, list[Any]]]


def _run(
    scheduler: _Scheduler, optimizer: torch.optim.Optimizer, first_numbers: list[dict[str, object]], steps: int
) -> _ScheduledValues:
    """Return what the scheduler sets, for every number of its steps less than `steps`.

    Args:
        scheduler: the scheduler, which has taken no step.
        optimizer: its optimizer.
        first_numbers: for every parameter group, its hyperparameters before the scheduler was made.
        steps: the number of values.
    """
    scheduled_values: _ScheduledValues = [{} for _ in first_numbers]
    optimizer.step()  # torch's schedulers warn if it is never called
    for count in range(steps):
        if count > 0:
            try:
                scheduler.step()
            except Exception as error:
                raise ValueError(
                    f"schedule: steps must be at most {count}, or the scheduler must be made for more: its step number "
                    f"{count} raised {type(error).__name__}: {_first_line(error)}; got steps={steps}"
                ) from error
        for group, group_numbers, values_by_name in zip(optimizer.param_groups, first_numbers, scheduled_values):
            for name, first_number in group_numbers.items():
                value = group[name]
                if name in values_by_name:
                    values_by_name[name].append(_as_number(name, value, count, scheduler))
                elif value is not first_number:
                    # Set for the first time; a scheduler that sets the same number does not change it.
                    number = _as_number(name, value, count, scheduler)
                    if number != first_number:
                        values_by_name[name] = [first_number] * count + [number]
    return scheduled_values


def _as_number(name: str, value: object, count: int, scheduler: _Scheduler) -> object:
    """Return a finite float, or a tuple of them.

    Args:
        name: the hyperparameter's name.
        value: what the scheduler set.
        count: the number of steps that the scheduler has taken.
        scheduler: the scheduler.

    Raises:
        TypeError: value is no Python number.
        ValueError: it is not finite.
    """
    if isinstance(value, (tuple, list)):
        return tuple(_as_number(f"{name}[{index}]", item, count, scheduler) for index, item in enumerate(value))
    kind = type(scheduler).__name__
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"schedule: make's {kind} must set {name} to a Python number; got {_tree.brief(value)} after {count} "
            "steps: take float(...) of it in the scheduler's function"
        )
    if not math.isfinite(value):
        raise ValueError(f"schedule: make's {kind} must set {name} to a finite number; got {value} after {count} steps")
    return float(value)


def _with_tables(hyperparameter: object, first_number: object, name: str, values: list[Any], source: str) -> object:
    """Return a table for a number that changes; for a tuple, one for each of its items that does.

    Args:
        hyperparameter: what `stateless` got.
        first_number: its number before the scheduler was made, an example if it is a tensor or a schedule.
        name: its name.
        values: what the scheduler sets, one for each step.
        source: the scheduler's class, for messages and the table's repr.

    Raises:
        TypeError: the scheduler changes a tensor or a schedule.
    """
    if isinstance(first_number, (tuple, list)):
        items_before = hyperparameter if isinstance(hyperparameter, (tuple, list)) else first_number
        values_of_items = [list(item_values) for item_values in zip(*values)]
        items = []
        for index, (item, first_item, item_values) in enumerate(
            zip(items_before, first_number, values_of_items, strict=True)
        ):
            items.append(_with_tables(item, first_item, f"{name}[{index}]", item_values, source))
        return tuple(items)
    if all(value == first_number for value in values):
        return hyperparameter
    if is_dynamic(hyperparameter):
        raise TypeError(
            f"schedule: optimizer must have a number as {name}, because {source} sets it; got "
            f"{_tree.brief(hyperparameter)}: give stateless the number from which the scheduler starts"
        )
    argument = hyperparameter if isinstance(hyperparameter, (int, float)) else None
    return Table(values, source, argument or None)  # a class may have another formula for 0


def _first_line(error: Exception) -> str:
    text = str(error.args[0]) if error.args else ""  # the text of a KeyError is quoted, with its lines joined
    return text.split("\n")[0]
