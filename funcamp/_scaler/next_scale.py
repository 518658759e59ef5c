"""The bounds of the configuration, applied after every rule."""

from __future__ import annotations

from torch import Tensor

from funcamp._scaler.config import ScalerConfig


def bounded(scale: Tensor, config: ScalerConfig) -> Tensor:
    """Return the scale clamped to [min_scale, max_scale]."""
    return scale.clamp(config.min_scale, config.max_scale) if config.has_bounds else scale
