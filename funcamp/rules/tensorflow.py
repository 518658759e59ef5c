"""The rule of tf.keras."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import is_overflow, move, moved_scales


class TensorFlow(Rule):
    """Jmp's rule, but a tracker beyond growth_interval grows too."""

    divides = True

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `LossScaleOptimizer`."""
        scales = moved_scales(state, config, factors=torch.float32, finite_growth=True)
        clean_steps = state.growth_tracker + 1
        grows = ~is_overflow(state) & (clean_steps >= config.growth_interval)
        return move(state, scales, grows=grows)


def tensorflow(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
) -> ScalerConfig:
    """Return the rule of tf.keras's `LossScaleOptimizer`: the minimum is 1, growth stays finite.

    Example:
        >>> presets.tensorflow().min_scale
        1.0

    References:
        tf_keras/src/mixed_precision/loss_scale_optimizer.py, tf-keras 2.21.0.
    """
    return ScalerConfig(
        init_scale=initial_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=dynamic_growth_steps,
        min_scale=1.0,
        rule=TensorFlow(),
    )
