"""Write the next scale of a `GradScaler` in place: by its rule, or as the caller sets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.state import RuleState, ScalerState, with_counters
from funcamp._scaler.update import update


def apply_rule(state: ScalerState, counters: Mapping[str, Tensor], config: ScalerConfig) -> None:
    """Write the next scale, growth tracker and counters in place.

    state: tensors of the scaler, with the flag of this update.
    counters: the further counters of the configuration's rule, by name.
    """
    with torch.no_grad():
        if config.is_torchs and _upstream.update_scale:
            # The same rule in one kernel.
            _upstream.update_scale(
                state.scale,
                state.growth_tracker,
                state.found_inf,
                config.growth_factor,
                config.backoff_factor,
                config.growth_interval,
            )
            return
        new_state = update(with_counters(state, dict(counters)), config)
        state.scale.copy_(new_state.scale)
        state.growth_tracker.copy_(new_state.growth_tracker)
        for name, counter in counters.items():
            counter.copy_(cast(RuleState, new_state).counters[name])


def set_scale(scale: Tensor, value: float | Tensor, device_type: str, config: ScalerConfig) -> None:
    """Write a scale that the caller chooses, within the configuration's bounds.

    Raises:
        AssertionError: value is neither a number nor a tensor, or a tensor of several elements, on another type of
            device, or requires grad.
    """
    if isinstance(value, Tensor):
        is_usable = value.numel() == 1 and not value.requires_grad and value.device.type == device_type
    else:
        is_usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_usable:
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
    if isinstance(value, Tensor):
        scale.copy_(value.reshape(()))
    else:
        scale.fill_(value)
    if config.has_bounds:
        scale.clamp_(config.min_scale, config.max_scale)
