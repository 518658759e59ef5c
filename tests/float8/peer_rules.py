"""How torchao scales a tensor into float8, in plain Python: what `funcamp.float8` is measured against."""

from __future__ import annotations

import math

from tests.support.oracle import float32


def torchao_scale(amax: float, fp8_max: float, round_scales_to_power_of_2: bool = False) -> float:
    """`amax_to_scale`, torchao/float8/float8_utils.py, pytorch/ao at 36027d8: float64, then rounded.

    There the power of two is exp2(floor(log2(scale))) in float32: within one bit of a power of two its logarithm may
    round up, and the scale is then that power. Here it is the power of two at or below the scale.
    """
    scale = float32(fp8_max / (amax if amax > 1e-12 or math.isnan(amax) else 1e-12))
    if round_scales_to_power_of_2 and scale > 0:
        return math.ldexp(1.0, math.frexp(scale)[1] - 1)
    return scale
