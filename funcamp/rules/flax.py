"""The rule of flax."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import MovedScales, growth_due, move, moved_scales

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Flax(Rule):
    """Growth after growth_interval + 1 clean steps, up to float32's largest number."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `DynamicScale`."""
        lower, higher = moved_scales(state, config, factors=torch.float32)
        scales = MovedScales(lower, higher.clamp(max=_FLOAT32_MAX))
        return move(state, scales, grows=growth_due(state, config.growth_interval + 1))


def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = 2.0**-126,
) -> ScalerConfig:
    """Return the rule of flax's `DynamicScale`: growth after growth_interval + 1 steps.

    Growth stops at float32's largest number.

    Example:
        >>> presets.flax().growth_interval
        2000

    References:
        flax/training/dynamic_scale.py, flax 0.12.8.
    """
    return ScalerConfig(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=minimum_scale,
        rule=Flax(),
    )
