"""The rules of apex: that of apex.amp, and that of the kernel which NeMo calls."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import HysteresisRule, growth_due, is_overflow, move, moved_scales


class Apex(Rule):
    """Torch's rule with two differences: backoff divides, and the maximum replaces also an infinite scale."""

    divides = True

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `LossScaler`. The configuration's bounds turn growth to infinity into the maximum."""
        scales = moved_scales(state, config, factors=torch.float64)
        return move(state, scales, grows=growth_due(state, config.growth_interval))


class ApexHysteresis(HysteresisRule):
    """Megatron's rule with float64 factors and finite growth; any clean step resets the count of overflows."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `update_scale_hysteresis`."""
        overflow = is_overflow(state)
        left = self.overflows_left(state)
        return move(
            state,
            moved_scales(state, config, factors=torch.float64, finite_growth=True),
            grows=growth_due(state, config.growth_interval),
            backs_off=overflow & (left <= 0),
            counters={"hysteresis_tracker": torch.where(overflow, left, self.hysteresis)},
        )


def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> ScalerConfig:
    """Return the rule of apex.amp's `LossScaler`.

    The factors are 2 and 1/2, because apex ignores its scale_factor. The scale is float32; apex's is a Python float.

    Example:
        >>> presets.apex().max_scale
        16777216.0

    References:
        apex/amp/scaler.py, NVIDIA/apex before amp was removed.
    """
    min_scale = None if min_loss_scale == 0 else min_loss_scale
    # Check the arguments before min() compares them.
    ScalerConfig(init_scale=init_scale, growth_interval=scale_window, min_scale=min_scale)
    ScalerConfig(init_scale=max_loss_scale)
    return ScalerConfig(
        init_scale=min(max_loss_scale, init_scale),
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=scale_window,
        min_scale=min_scale,
        max_scale=max_loss_scale,
        rule=Apex(),
    )


def apex_hysteresis(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> ScalerConfig:
    """Return the rule of apex's `update_scale_hysteresis` kernel, which NeMo calls.

    The hysteresis-th overflow in a row and every later one lower the scale. Any clean step resets the count.

    Example:
        >>> presets.apex_hysteresis(hysteresis=2).rule
        ApexHysteresis(hysteresis=2)

    References:
        csrc/update_scale_hysteresis.cu, NVIDIA/apex.
    """
    rule = ApexHysteresis(hysteresis)
    return ScalerConfig(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        rule=rule,
    )
