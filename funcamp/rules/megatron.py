"""The rule of Megatron-LM."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import HysteresisRule, growth_due, is_overflow, move, moved_scales


class Megatron(HysteresisRule):
    """The hysteresis-th overflow and every later one lower the scale; only growth, which may be infinite, resets."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `DynamicGradScaler`."""
        left = self.overflows_left(state)
        grows = growth_due(state, config.growth_interval)
        return move(
            state,
            moved_scales(state, config, factors=torch.float32),
            grows=grows,
            backs_off=is_overflow(state) & (left <= 0),
            counters={"hysteresis_tracker": torch.where(grows, self.hysteresis, left)},
        )


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> ScalerConfig:
    """Return the rule of Megatron-LM's `DynamicGradScaler`.

    The hysteresis-th overflow and every later one lower the scale. Only growth resets the count. Growth may reach
    infinity.

    Example:
        >>> presets.megatron().init_scale
        4294967296.0

    References:
        megatron/core/optimizer/grad_scaler.py, megatron-core 0.16.1.
    """
    rule = Megatron(hysteresis)
    return ScalerConfig(
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        rule=rule,
    )
