"""The scaler's state as torch.amp.GradScaler saves it."""

from __future__ import annotations

import math
from dataclasses import replace as changed
from typing import Any

import torch

from funcamp._check import integer, real
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.state import ScalerState, tensors_of, with_counters
from funcamp._scaler.update import checked, first_counters, init

_CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval")


def to_state_dict(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> dict[str, Any]:
    """Give the scaler's state and constants as `torch.amp.GradScaler.state_dict` does.

    Five entries: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; and the counters of a rule
    that has more, by their names. found_inf is left out: save between `update` and the next step. Syncs: reads the
    state.

    Args:
        state: the state after `update`.
        config: the configuration the state was made with.

    Returns:
        Python numbers, which `torch.amp.GradScaler.load_state_dict` and `from_state_dict` take.

    Raises:
        TypeError: config is no `ScalerConfig`, or state is no state of its rule.

    Example:
        >>> to_state_dict(init(ScalerConfig(init_scale=8.0)))["scale"]
        8.0

    References:
        `GradScaler.state_dict`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    state, config = checked("to_state_dict", state, config)
    saved: dict[str, Any] = {"scale": state.scale.item()}
    saved |= {name: getattr(config, name) for name in _CONSTANTS}
    saved["_growth_tracker"] = state.growth_tracker.item()
    counters: dict[str, torch.Tensor] = getattr(state, "counters", {})
    return saved | {name: counter.item() for name, counter in counters.items()}


def from_state_dict(
    saved: dict[str, Any], config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None
) -> tuple[ScalerState, ScalerConfig]:
    """Make a state and a configuration of what `to_state_dict` or `torch.amp.GradScaler.state_dict` gave. No sync.

    Args:
        saved: the five entries, and counters of the configuration's rule; one that is missing starts anew.
        config: rule and bounds; its growth_factor, backoff_factor and growth_interval are replaced by the saved ones.
        device: where the state lives. None for torch's default device.

    Returns:
        The state, and the configuration to go on with.

    Raises:
        TypeError: saved is no dict, config no `ScalerConfig`, or an entry no number.
        ValueError: an entry is missing or out of range; saved is empty, a disabled scaler's.

    Example:
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        >>> state, config = from_state_dict(scaler.state_dict())
        >>> state.scale, config.growth_interval
        (tensor(8.), 100)

    References:
        `GradScaler.load_state_dict`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    call, config = "from_state_dict", check_config("from_state_dict", config)
    if not isinstance(saved, dict):
        raise TypeError(f"{call}: saved must be a dict; got {saved!r}")
    for name in ("scale", *_CONSTANTS, "_growth_tracker"):
        if name not in saved:
            why = "is empty, as a disabled scaler saves it" if not saved else f"has {', '.join(map(str, saved))}"
            raise ValueError(f"{call}: saved must have {name!r}; it {why}")
    scale = saved_scale(call, saved["scale"])
    config = changed(config, **{name: saved[name] for name in _CONSTANTS})
    tracker = saved_count(call, "_growth_tracker", saved["_growth_tracker"])
    counters = tensors_of(saved_counters(call, saved, config), device)
    first = init(config, device=device)
    state = ScalerState(
        torch.full_like(first.scale, scale), torch.full_like(first.growth_tracker, tracker), first.found_inf
    )
    return with_counters(state, counters), config


def saved_scale(call: str, value: object) -> float:
    """A saved scale: 0 or more, a float32; infinite too, for torch saves what it came to."""
    number = real(call, "saved['scale']", value)
    if not (0.0 <= number <= torch.finfo(torch.float32).max or (number == math.inf and isinstance(value, float))):
        raise ValueError(f"{call}: saved['scale'] must be 0 or more, within float32's range; got {value!r}")
    return number


def saved_count(call: str, name: str, value: object) -> int:
    """A saved counter: an int32."""
    return integer(call, f"saved[{name!r}]", value, -(2**31), 2**31 - 1)


def saved_counters(call: str, saved: dict[str, Any], config: ScalerConfig) -> dict[str, int]:
    """What a configuration's rule counts; a count that was not saved starts anew."""
    return {name: saved_count(call, name, saved.get(name, first)) for name, first in first_counters(config).items()}
