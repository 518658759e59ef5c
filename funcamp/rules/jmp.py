"""The rule of jmp."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import growth_due, inverse, move, moved_scales


class Jmp(Rule):
    """Torch's rule in float32; backoff divides by growth_factor, and the tracker is taken modulo growth_interval."""

    divides = True

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `DynamicLossScale`."""
        scales = moved_scales(state, config, factors=torch.float32, finite_growth=True)
        moved = move(state, scales, grows=growth_due(state, config.growth_interval))
        tracker = moved.growth_tracker % config.growth_interval
        return Outcome(moved.scale, tracker, backs_off=moved.backs_off, grows=moved.grows)


def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2.0,
    min_loss_scale: float = 1.0,
) -> ScalerConfig:
    """Return the rule of jmp's `DynamicLossScale` outside jit; under jit jmp loses its min_loss_scale.

    Example:
        >>> presets.jmp().min_scale
        1.0

    References:
        jmp/_src/loss_scale.py, jmp 0.0.4.
    """
    return ScalerConfig(
        init_scale=loss_scale,
        growth_factor=factor,
        backoff_factor=inverse("factor", factor),
        growth_interval=period,
        min_scale=min_loss_scale,
        rule=Jmp(),
    )
