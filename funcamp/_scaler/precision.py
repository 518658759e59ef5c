"""Scales in float64: factors and reciprocals are rounded once, to float32."""

from __future__ import annotations

from torch import Tensor


def widen(scale: Tensor) -> Tensor:
    """Return the scale in float64, for factors and reciprocals; float32 on MPS, which has no float64."""
    return scale if scale.device.type == "mps" else scale.double()


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, float32."""
    # On some devices and compilers float32 division is approximate; float64 division is exact after rounding.
    return widen(scale).reciprocal().float()
