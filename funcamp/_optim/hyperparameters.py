"""Hyperparameters that change in training: tensors of shape (), schedules of the applied steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp._scaler.state import wide_dtype

#: The parameters of a class's constructor, by name.
Signature: TypeAlias = Mapping[str, inspect.Parameter]
#: The dynamic hyperparameters of a step, by name: each a tensor of shape (), or a tuple with such tensors.
Hyper: TypeAlias = dict[str, Any]

#: The fix for a user who assigns to an attribute of an optimizer.
ANOTHER = (
    "Make another with {name}={value!r}, which continues from the same state; or give stateless a tensor, and fill_ "
    "it, or a schedule"
)


def map_items(fn: Callable[..., object], value: object, *others: object) -> Any:
    """Call fn(value, *others) on a hyperparameter, or on each item of a tuple of them.

    An item gets the items of the others, None if another is no tuple.
    """
    if not isinstance(value, (tuple, list)):
        return fn(value, *others)
    others_items = [other if isinstance(other, (tuple, list)) else [None] * len(value) for other in others]
    return type(value)(map(fn, value, *others_items))


def is_dynamic(value: object) -> bool:
    """Return whether a hyperparameter, or an item of a tuple, is a tensor or a schedule; a class is a constant."""
    if isinstance(value, (tuple, list)):
        return any(is_dynamic(item) for item in value)
    return isinstance(value, Tensor) or (callable(value) and not isinstance(value, type))


def example_of(name: str, value: object, accepted: Signature) -> object:
    """Return a number for a tensor or schedule, with which the class is made.

    It is the class's default, or another number if that is 0: a tensor or a schedule is in use.
    """
    default = accepted[name].default if name in accepted else None

    def number(item: object, item_default: object) -> object:
        if not is_dynamic(item):
            return item
        return (item_default or 0.1) if isinstance(item_default, (int, float)) else 1e-3

    return map_items(number, value, default)


def check_tensor(call: str, name: str, value: object) -> None:
    """Raise TypeError or ValueError if a tensor is no float of shape ()."""
    if not isinstance(value, Tensor):
        return
    if value.dim() != 0:
        raise ValueError(f"{call}: {name} must have shape (); got {tuple(value.shape)}")
    # A schedule may return an integer tensor; into the user's own fill_(0.5) would write 0.
    if value.dtype == torch.bool or value.is_complex() or not (call == "update" or value.is_floating_point()):
        raise TypeError(f"{call}: {name} must hold a float, as torch.tensor(1.0) does; got {value.dtype}")


def evaluate(name: str, value: object, applied: Tensor) -> object:
    """Return a hyperparameter after some applied steps: a tensor for a schedule, otherwise as it is.

    The count is on the parameters' device.

    Raises:
        TypeError: a schedule returns neither a number nor a tensor, or a tensor holds no real numbers.
        ValueError: a tensor has a shape other than (), or is on another type of device than the parameters.
    """

    def current_value(item: object) -> object:
        if not is_dynamic(item):
            return item
        current = item(applied) if callable(item) else item
        if isinstance(current, (int, float)) and not isinstance(current, bool):
            return torch.full((), current, dtype=wide_dtype(applied.device), device=applied.device)
        if not isinstance(current, Tensor):
            raise TypeError(f"update: {name} must be a number or a tensor of shape (); got {current!r}")
        check_tensor("update", name, current)
        if current.device.type != applied.device.type:
            raise ValueError(
                f"update: {name} must be on the parameters' type of device, {applied.device.type}; got {current.device}"
            )
        return current

    return map_items(current_value, value)
