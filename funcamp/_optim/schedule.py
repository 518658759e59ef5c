"""torch's learning-rate schedulers for pure optimizers: run once, their values are a table of the applied steps."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from funcamp import _tree
from funcamp._check import integer
from funcamp._optim.by_group import GroupedOptimizer, check_optimizer
from funcamp._optim.hyperparameters import is_dynamic
from funcamp._optim.modes import without_modes
from funcamp._optim.stateless import StatelessOptimizer, stateless
from funcamp._optim.table import Table

#: The pure optimizer that is given, and the kind that is returned.
Pure = TypeVar("Pure", StatelessOptimizer, GroupedOptimizer)


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
        kind = type(make).__name__
        raise TypeError(
            "schedule: make must be a function that makes a scheduler for the optimizer that it is given, such as "
            f"lambda optimizer: {kind if hasattr(make, 'step') else 'CosineAnnealingLR'}(optimizer, ...); "
            f"got {_tree.brief(make)}"
        )
    steps = integer("schedule", "steps", steps, 1)
    if isinstance(optimizer, GroupedOptimizer):
        parts = {label: _checked(f"optimizer {label!r}", part) for label, part in optimizer.optimizers.items()}
        several = len({part._cls for part in parts.values()}) > 1
        together = [{label: part} for label, part in parts.items()] if several else [parts]
        scheduled = {label: new for some in together for label, new in _scheduled(some, make, steps).items()}
        return GroupedOptimizer(scheduled, optimizer.group)
    return _scheduled({"": _checked("optimizer", optimizer)}, make, steps)[""]


def _checked(name: str, optimizer: Any) -> StatelessOptimizer:
    if not isinstance(optimizer, StatelessOptimizer):
        raise TypeError(
            f"schedule: {name} must be made by stateless, because a scheduler needs torch's parameter groups; "
            f"got {_tree.brief(optimizer)}: compute its rate from the count of steps in its state"
        )
    return optimizer


def _scheduled(
    parts: Mapping[str, StatelessOptimizer], make: Callable[[Any], Any], steps: int
) -> dict[str, StatelessOptimizer]:
    """Return the optimizers with the values of one scheduler, which sees them as the groups of one torch optimizer."""
    with without_modes():
        torchs = _torch_optimizer(list(parts.values()))
        before = [{name: value for name, value in group.items() if name != "params"} for group in torchs.param_groups]
        scheduler = _made(make, torchs)
        columns = _run(scheduler, torchs, before, steps)
    found = {}
    for (label, part), numbers_before, column in zip(parts.items(), before, columns):
        new = dict(part._hyperparameters)
        for name, values in column.items():
            given = new.get(name, numbers_before[name])
            new[name] = _in_place_of(given, numbers_before[name], name, values, type(scheduler).__name__)
        found[label] = stateless(part._cls, **new) if column else part
    return found


def _torch_optimizer(parts: list[StatelessOptimizer]) -> torch.optim.Optimizer:
    """Return a torch optimizer with a group for each of some optimizers of one class; its step does nothing."""
    cls, groups = parts[0]._cls, []
    for part in parts:
        (group,) = cls([torch.zeros(2, 2)], **part._traits.arguments).param_groups
        groups.append(group)
    idle = type(cls.__name__, (cls,), {"step": _do_nothing, "__module__": cls.__module__})
    made: torch.optim.Optimizer = idle(groups, **parts[0]._traits.arguments)
    return made


def _do_nothing(_: Any, closure: Any = None) -> None:
    """Take the place of an optimizer's step."""


def _made(make: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler, which must be a fresh one of the optimizer."""
    try:
        scheduler = make(optimizer)
    except Exception as error:
        fix = ""
        if "initial_lr" in str(error):
            fix = ": leave last_epoch out, because a resumed run continues at the count in its state"
        raise ValueError(
            "schedule: make must return a scheduler of the optimizer that it is given; it raised "
            f"{type(error).__name__}: {_first_line(error)}{fix}"
        ) from error
    kind = type(scheduler).__name__
    if isinstance(scheduler, (type, torch.optim.Optimizer)) or not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            "schedule: make must return a scheduler, one object with a method step (SequentialLR and ChainedScheduler "
            f"combine several); got {_tree.brief(scheduler)}"
        )
    needed = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            "schedule: make must return a scheduler whose step needs no argument, because its values are computed "
            f"before training; got a {kind}, whose step needs {', '.join(needed)}: give stateless lr=torch.tensor(...) "
            "of shape (), and fill_ it between steps"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "schedule: make must return a scheduler of the optimizer that it is given; got one of another optimizer: "
            f"write lambda optimizer: {kind}(optimizer, ...)"
        )
    for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
        count = getattr(one, "last_epoch", 0)
        if isinstance(count, int) and count > 0:
            raise ValueError(
                "schedule: make must return a scheduler that starts at step 0, because a resumed run continues at the "
                f"count in its state; got a {type(one).__name__} with last_epoch={count}: leave last_epoch out"
            )
    return scheduler


#: For every parameter group, the values of each hyperparameter that changes.
_Columns = list[dict[str, list[Any]]]


def _run(scheduler: Any, optimizer: torch.optim.Optimizer, before: list[dict[str, Any]], steps: int) -> _Columns:
    """Return what the scheduler sets, for every number of its steps less than `steps`."""
    columns: _Columns = [{} for _ in before]
    optimizer.step()  # torch's schedulers warn if it is never called
    for count in range(steps):
        if count:
            try:
                scheduler.step()
            except Exception as error:
                raise ValueError(
                    f"schedule: steps must be at most {count}, or the scheduler must be made for more: its step number "
                    f"{count} raised {type(error).__name__}: {_first_line(error)}; got steps={steps}"
                ) from error
        for group, start, column in zip(optimizer.param_groups, before, columns):
            for name, value_before in start.items():
                value = group[name]
                if name in column:
                    column[name].append(_as_number(name, value, count, scheduler))
                elif value is not value_before:
                    number = _as_number(name, value, count, scheduler)
                    if number != value_before:
                        column[name] = [value_before] * count + [number]
    return columns


def _as_number(name: str, value: Any, count: int, scheduler: Any) -> Any:
    """Return a finite float, or a tuple of them."""
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


def _in_place_of(given: Any, before: Any, name: str, values: list[Any], source: str) -> Any:
    """Return a table for a number that changes; for a tuple, one for each of its items that does."""
    if isinstance(before, (tuple, list)):
        given = given if isinstance(given, (tuple, list)) else before
        columns = [list(column) for column in zip(*values)]
        return tuple(
            _in_place_of(item, item_before, f"{name}[{index}]", column, source)
            for index, (item, item_before, column) in enumerate(zip(given, before, columns, strict=True))
        )
    if all(value == before for value in values):
        return given
    if is_dynamic(given):
        raise TypeError(
            f"schedule: optimizer must have a number as {name}, because {source} sets it; got {_tree.brief(given)}: "
            "give stateless the number from which the scheduler starts"
        )
    return Table(values, source)


def _first_line(error: Exception) -> str:
    text = str(error.args[0]) if error.args else ""  # the text of a KeyError is quoted, with its lines joined
    return text.split("\n")[0]
