"""Errors for arguments that belong to torch.optim's way of making an optimizer."""

from __future__ import annotations

import functools
import inspect
import numbers

import torch
from torch import Tensor

from funcamp import _tree

_CALL = "stateless"
#: How to use a scheduler of torch.
_SCHEDULE = "write funcamp.schedule(optimizer, lambda optimizer: StepLR(optimizer, 30), steps=...)"


def check_class(cls: object) -> None:
    """Raise TypeError if this is no optimizer class."""
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        return
    got = _tree.brief(cls)
    fix = ""
    if isinstance(cls, torch.optim.Optimizer):
        got = f"one of class {type(cls).__name__}"
        fix = f": write {as_stateless(cls)}"
    elif isinstance(cls, functools.partial) and isinstance(cls.func, type):
        arguments = "".join(f", {name}={value!r}" for name, value in cls.keywords.items())
        fix = f": write stateless({path_of(cls.func)}{arguments})"
    elif isinstance(cls, str):
        class_names = {name.lower(): name for name, value in vars(torch.optim).items() if isinstance(value, type)}
        if cls.lower() in class_names:
            fix = f": write stateless(torch.optim.{class_names[cls.lower()]})"
    raise TypeError(f"{_CALL}: optimizer must be a subclass of torch.optim.Optimizer; got {got}{fix}")


def refuse_positional(cls: type, positional: tuple[object, ...]) -> None:
    """Raise TypeError if an argument after the class has no name."""
    if not positional:
        return
    value = positional[0]
    if isinstance(value, numbers.Real):
        raise TypeError(
            f"{_CALL}: hyperparameters must be given by name; got {value!r}: write "
            f"{_CALL}({path_of(cls)}, lr={value!r})"
        )
    refuse_parameters(cls, value)


def refuse_parameters(cls: type, value: object) -> None:
    """Raise TypeError, because parameters were given."""
    fix = f"write {_CALL}({path_of(cls)}, lr=...)"
    has_groups = isinstance(value, (list, tuple)) and value and isinstance(value[0], dict)
    if has_groups:
        fix += " for each group, in by_group({...}, group=...)"
    raise TypeError(f"{_CALL}: parameters must not be given, as they are in the state; got {_tree.brief(value)}: {fix}")


def refuse_schedulers(name: str, value: object) -> None:
    """Raise TypeError if a hyperparameter is a scheduler of torch, which sets the numbers of an instance."""
    scheduler = torch.optim.lr_scheduler.LRScheduler
    is_scheduler_class = isinstance(value, type) and issubclass(value, scheduler)
    if is_scheduler_class or isinstance(value, scheduler):
        got = f"the class {value.__name__}" if isinstance(value, type) else _tree.brief_kind(value)
        raise TypeError(
            f"{_CALL}: {name} must be a number, a tensor or a schedule, a function of the count of applied steps; got "
            f"{got}, which sets the numbers of a torch.optim.Optimizer: {_SCHEDULE}"
        )


def missing(optimizer: object, name: str) -> AttributeError:
    """Return the error for an attribute that a pure optimizer lacks, with the fix if torch's has it."""
    fix = ""
    if hasattr(torch.optim.Optimizer, name) or name in ("param_groups", "state", "defaults"):
        fix = (
            ", as it is no torch.optim.Optimizer: take update(params, grads, opt_state), or a step of make_train_step; "
            f"for a scheduler of torch {_SCHEDULE}"
        )
    return AttributeError(f"{optimizer!r}: has no {name!r}{fix}")


def as_stateless(optimizer: torch.optim.Optimizer) -> str:
    """Return the call that makes the same optimizer: the class and its non-default hyperparameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    arguments = [path_of(type(optimizer))]
    for name, value in optimizer.param_groups[0].items():
        if name not in accepted or name in ("params", "fused", "foreach", "capturable", "differentiable"):
            continue
        if isinstance(value, Tensor):
            arguments.append(f"{name}=...")
        elif name == "lr" or value != accepted[name].default:
            arguments.append(f"{name}={value!r}")
    return f"stateless({', '.join(arguments)})"


def path_of(cls: type) -> str:
    """Return the name by which a class is imported."""
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
