"""The rules of Paddle: that of its static graphs, and that of its dygraph mode."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import HysteresisRule, MovedScales, growth_due, is_overflow, move, moved_scales


class Paddle(HysteresisRule):
    """Every hysteresis-th overflow in a row lowers the scale; growth stays finite."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `update_loss_scaling`."""
        scales = moved_scales(state, config, factors=torch.float32, finite_growth=True)
        return self._count_and_move(state, config, scales)

    def _count_and_move(self, state: ScalerState, config: ScalerConfig, scales: MovedScales) -> Outcome:
        """Return the outcome of a step. A clean step and a backoff reset the count of overflows."""
        overflow = is_overflow(state)
        left = self.overflows_left(state)
        backs_off = overflow & (left <= 0)
        return move(
            state,
            scales,
            grows=growth_due(state, config.growth_interval),
            backs_off=backs_off,
            counters={"hysteresis_tracker": torch.where(~overflow | backs_off, self.hysteresis, left)},
        )


class PaddleDygraph(Paddle):
    """`Paddle`, but growth may reach infinity."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `paddle.amp.GradScaler`."""
        scales = moved_scales(state, config, factors=torch.float32)
        return self._count_and_move(state, config, scales)


def paddle(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> ScalerConfig:
    """Return the rule of Paddle's `update_loss_scaling`: every n-th overflow in a row backs off, to 1.

    Example:
        >>> presets.paddle(decr_every_n_nan_or_inf=2).rule
        Paddle(hysteresis=2)

    References:
        paddle/phi/kernels/impl/amp_kernel_impl.h, Paddle 3.3.1.
    """
    rule = Paddle(decr_every_n_nan_or_inf)
    return ScalerConfig(
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        min_scale=1.0,
        rule=rule,
    )


def paddle_dygraph(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> ScalerConfig:
    """Return the rule of `paddle.amp.GradScaler`: `paddle` without a minimum; growth may reach infinity.

    Example:
        >>> presets.paddle_dygraph().min_scale is None
        True

    References:
        python/paddle/amp/grad_scaler.py, Paddle 3.3.1.
    """
    rule = PaddleDygraph(decr_every_n_nan_or_inf)
    return ScalerConfig(
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        rule=rule,
    )
