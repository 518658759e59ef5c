"""The arguments of `GradScaler`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcamp import _tree
from funcamp._check import real
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.state_dict import saved_count, saved_counters, saved_scale

#: torch's defaults of init_scale, growth_factor, backoff_factor and growth_interval.
_DEFAULT_NUMBERS = (2.0**16, 2.0, 0.5, 2000)


def checked_device(device: object) -> str:
    """Return the type of device; raise TypeError if it is neither a string nor a torch.device."""
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise TypeError(f"GradScaler: device must be a string, as in torch.amp; got {_tree.brief(device)}")
    return device


def checked_numbers(
    numbers: tuple[float, float, float, int], config: ScalerConfig | None
) -> tuple[float, float, float, int]:
    """Return the first scale, growth factor, backoff factor and growth interval: those of the configuration if given.

    Raises:
        TypeError: one is not a number, or config is not a `ScalerConfig`.
        ValueError: both config and another number than the default are given.
    """
    for name, number in zip(("init_scale", "growth_factor", "backoff_factor", "growth_interval"), numbers):
        real("GradScaler", name, number)
    if config is None:
        return numbers
    check_config("GradScaler", config)
    if numbers != _DEFAULT_NUMBERS:
        raise ValueError(
            "GradScaler: init_scale, growth_factor, backoff_factor and growth_interval must be left out if "
            f"config is given; got {numbers}"
        )
    return config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval


@dataclass(frozen=True)
class SavedScaler:
    """The checked entries of a scaler's state_dict."""

    scale: float
    growth_tracker: int
    counters: dict[str, int]
    """The further counters of the rule, by name."""
    constants: dict[str, Any]
    """The growth factor, the backoff factor and the growth interval, which the configuration checks."""


def check_saved(state_dict: object, config: ScalerConfig) -> SavedScaler:
    """Return the entries of a scaler's state_dict.

    Raises:
        KeyError: an entry is missing.
        RuntimeError: state_dict is empty.
        TypeError: it is not a dict, or an entry is neither a number nor a tensor of shape ().
        ValueError: a number in it cannot be used.
    """
    call = "GradScaler.load_state_dict"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{call}: state_dict must be a dict; got {_tree.brief(state_dict)}")
    if len(state_dict) == 0:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    if "scale" not in state_dict:  # another object's; if only a part is missing, torch's error names it
        got = _tree.brief(state_dict)
        raise KeyError(f"{call}: state_dict must have 'scale', as scaler.state_dict() has; got {got}")
    saved = {name: _number(value) for name, value in state_dict.items()}
    scale = saved_scale(call, saved["scale"])
    constants = {name: saved[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    growth_tracker = saved_count(call, "_growth_tracker", saved["_growth_tracker"])
    counters = saved_counters(call, saved, config)
    return SavedScaler(scale, growth_tracker, counters, constants)


def _number(value: Any) -> Any:
    """Return the number of a tensor of shape (), as other formats of files save it; anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
