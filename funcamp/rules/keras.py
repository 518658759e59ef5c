"""The rule of Keras 3."""

from __future__ import annotations

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import move_by_float32_factors


class Keras(Rule):
    """Torch's rule with factors rounded to float32 and growth up to infinity."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `LossScaleOptimizer`."""
        return move_by_float32_factors(state, config)


def keras(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
) -> ScalerConfig:
    """Return the rule of Keras 3's `LossScaleOptimizer`: no bounds, so growth may reach infinity.

    Example:
        >>> presets.keras().init_scale
        32768.0

    References:
        keras/src/optimizers/loss_scale_optimizer.py, Keras 3.15.1.
    """
    return ScalerConfig(
        init_scale=initial_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=dynamic_growth_steps,
        rule=Keras(),
    )
