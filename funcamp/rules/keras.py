"""The rule of Keras 3."""

from __future__ import annotations

from funcamp._scaler.config import ScalerConfig
from funcamp.rules.megatron import Megatron


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
        rule=Megatron(),  # its arithmetic, and every overflow backs off
    )
