"""Conversion of the scaler's state to and from the state_dict of torch.amp.GradScaler."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from funcamp import _tree
from funcamp._check import integer, real
from funcamp._scaler.config import ScalerConfig, check_config, check_state_and_config
from funcamp._scaler.first_state import init
from funcamp._scaler.state import ScalerState, counters_of, tensors_of, with_counters
from funcamp._types import StateDict

CONSTANTS = ("growth_factor", "backoff_factor", "growth_interval")


def to_state_dict(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> StateDict:
    """Return the scaler's state and constants in the format of `torch.amp.GradScaler.state_dict`.

    Five entries: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; and the rule's further
    counters, by name. found_inf is not saved: save between `update` and the next step. Syncs: reads the state.

    Args:
        state: the state after `update`.
        config: the configuration the state was made with.

    Returns:
        Python numbers, which `torch.amp.GradScaler.load_state_dict` and `from_state_dict` accept.

    Raises:
        TypeError: config is not a `ScalerConfig`, or state is not a state of its rule.

    Example:
        >>> to_state_dict(init(ScalerConfig(init_scale=8.0)))["scale"]
        8.0

    References:
        `GradScaler.state_dict`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    state, config = check_state_and_config("to_state_dict", state, config)
    saved: StateDict = {"scale": state.scale.item()}
    saved |= {name: getattr(config, name) for name in CONSTANTS}
    saved["_growth_tracker"] = state.growth_tracker.item()
    return saved | {name: counter.item() for name, counter in counters_of(state).items()}


def from_state_dict(
    saved: StateDict, config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None
) -> tuple[ScalerState, ScalerConfig]:
    """Return the state and configuration saved by `to_state_dict` or torch's scaler. No sync.

    Args:
        saved: the five entries of `torch.amp.GradScaler.state_dict`, and the counters of the configuration's rule; a
            missing counter starts anew.
        config: rule and bounds; its growth_factor, backoff_factor and growth_interval are replaced by the saved ones.
        device: the state's device. None for torch's default device.

    Returns:
        The state, and the configuration to continue with.

    Raises:
        TypeError: saved is not a dict, config not a `ScalerConfig`, or an entry not a number.
        ValueError: an entry is missing or out of range, or is not one of the configuration's rule; saved is empty, as a
            disabled scaler saves it.

    Example:
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        >>> state, config = from_state_dict(scaler.state_dict())
        >>> state.scale, config.growth_interval
        (tensor(8.), 100)

    References:
        `GradScaler.load_state_dict`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    call = "from_state_dict"
    config = check_config(call, config)
    if not isinstance(saved, dict):
        raise TypeError(f"{call}: saved must be a dict; got {_tree.brief(saved)}")
    for name in ("scale", *CONSTANTS, "_growth_tracker"):
        if name not in saved:
            why = "is empty, as a disabled scaler saves it" if not saved else f"has {', '.join(map(str, saved))}"
            raise ValueError(f"{call}: saved must have {name!r}; it {why}")
    counters_of_others = saved.keys() - {"scale", *CONSTANTS, "_growth_tracker", *config.rule.first_counters()}
    if counters_of_others:
        raise ValueError(
            f"{call}: config must have the rule of the saved state; got {config.rule.name}, which does not keep "
            f"{_tree.listed(sorted(map(str, counters_of_others)))}: pass the configuration of the saved run"
        )
    scale = saved_scale(call, saved["scale"])
    constants = {name: saved[name] for name in CONSTANTS}
    config = replace(config, **constants)
    tracker = saved_count(call, "_growth_tracker", saved["_growth_tracker"])
    counters = tensors_of(saved_counters(call, saved, config), device)
    first_state = init(config, device=device)
    state = ScalerState(
        scale=torch.full_like(first_state.scale, scale),
        growth_tracker=torch.full_like(first_state.growth_tracker, tracker),
        found_inf=first_state.found_inf,
    )
    return with_counters(state, counters), config


def saved_scale(call: str, value: object) -> float:
    """Return a saved scale, a float32 of 0 or more; also infinity, because torch may save that."""
    number = real(call, "saved['scale']", value)
    # Of the value too, because `real` returns infinity for an integer beyond float64.
    is_infinity = number == math.inf and isinstance(value, float)
    if not is_infinity and not 0.0 <= number <= torch.finfo(torch.float32).max:
        raise ValueError(f"{call}: saved['scale'] must be 0 or more, within float32's range; got {value!r}")
    return number


def saved_count(call: str, name: str, value: object) -> int:
    """Return a saved counter, an int32."""
    return integer(call, f"saved[{name!r}]", value, -(2**31), 2**31 - 1)


def saved_counters(call: str, saved: StateDict, config: ScalerConfig) -> dict[str, int]:
    """Return the saved counters of a configuration's rule; a missing one starts anew."""
    first_counters = config.rule.first_counters()
    return {name: saved_count(call, name, saved.get(name, first)) for name, first in first_counters.items()}
