"""The arguments of `GradScaler`, checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from funcamp import _tree
from funcamp._check import real
from funcamp._scaler.config import ScalerConfig, check_config

#: torch's defaults of init_scale, growth_factor, backoff_factor and growth_interval.
_DEFAULT_NUMBERS = (2.0**16, 2.0, 0.5, 2000)


def checked_device(device: object) -> str:
    """Return the type of device; raise TypeError if it is neither a string nor a torch.device."""
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        fix = f': write GradScaler("cuda", init_scale={device})' if isinstance(device, (int, float)) else ""
        raise TypeError(f"GradScaler: device must be a string, as in torch.amp; got {_tree.brief(device)}{fix}")
    return device


def checked_numbers(
    numbers: tuple[float, float, float, int], config: ScalerConfig | None
) -> tuple[float, float, float, int]:
    """Return the first scale, growth factor, backoff factor and growth interval: those of the configuration if given.

    Raises:
        TypeError: one is no number, or config is no `ScalerConfig`.
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


def without_scale(call: str, state_dict: Mapping[str, object]) -> KeyError:
    """Return the error for another object's state_dict."""
    names = ", ".join(map(repr, list(state_dict)[:4]))
    if len(state_dict) > 4:
        names += ", ..."
    fix = ""
    if "scaler.scale" in state_dict:
        fix = ": step.to_torch(state)['scaler'] is a step's"
    elif "scaler" in state_dict:
        fix = ": load its 'scaler'"
    return KeyError(f"{call}: state_dict must have 'scale', as scaler.state_dict() has; it has {names}{fix}")
