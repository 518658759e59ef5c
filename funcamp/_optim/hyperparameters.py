"""Hyperparameters that change in training: tensors of shape (), schedules of the applied steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: What to do where a user assigns an attribute of an optimizer.
ANOTHER = (
    "Make another with {name}={value!r}, which continues from the same state; or give stateless a tensor, and fill_ "
    "it, or a schedule"
)


def is_dynamic(value: Any) -> bool:
    """Return whether a hyperparameter, or an item of a tuple, is a tensor or a schedule."""
    if isinstance(value, (tuple, list)):
        return any(is_dynamic(item) for item in value)
    return isinstance(value, Tensor) or callable(value)


def placeholder(value: Any, name: str, accepted: Mapping[str, inspect.Parameter]) -> Any:
    """Return a number for a tensor or schedule, because the constructor reads its arguments."""
    default = accepted[name].default if name in accepted else None

    def pick(item: Any, fallback: Any) -> Any:
        if not is_dynamic(item):
            return item
        return fallback if isinstance(fallback, (int, float)) and not isinstance(fallback, bool) else 1e-3

    if isinstance(value, (tuple, list)):
        defaults = default if isinstance(default, (tuple, list)) and len(default) == len(value) else [None] * len(value)
        return type(value)(pick(item, fallback) for item, fallback in zip(value, defaults))
    return pick(value, default)


def stand_in(value: Any, number: Any, device: str) -> Any:
    """Return tensors with the placeholders' values for tensors and schedules, to probe a device."""
    if isinstance(value, (tuple, list)):
        return type(value)(stand_in(item, part, device) for item, part in zip(value, number))
    return torch.full((), number, device=device) if is_dynamic(value) else value


def evaluate(name: str, value: Any, applied: Tensor, device: torch.device) -> Any:
    """Return a hyperparameter after some applied steps: calls schedules, keeps numbers and tensors.

    Raises:
        TypeError: a schedule returns neither a number nor a tensor.
        ValueError: a tensor has a shape other than (), or is on another type of device than the parameters.
    """
    if isinstance(value, (tuple, list)):
        return type(value)([evaluate(name, item, applied, device) for item in value])
    if callable(value):
        value = value(applied)
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"update: {name} must have shape (); got {tuple(value.shape)}")
        if value.device.type != device.type:
            raise ValueError(
                f"update: {name} must be on the parameters' type of device, {device.type}; got {value.device}"
            )
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"update: {name} must be a number or a tensor of shape (); got {value!r}")
    return value
