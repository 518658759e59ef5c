"""The magnitudes that rounding to a floating-point format loses.

underflow   0 < |x| <= half the smallest subnormal     (to nearest, ties to even: this tie goes to zero)
subnormal   half the smallest subnormal < |x| < the smallest normal
overflow    |x| >= the largest value and half a step   (the tie goes up: the largest value's last digit is odd;
                                                        float8_e4m3fn's is even: its tie, 464, stays)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Format(NamedTuple):
    """The bounds at which rounding to a dtype loses a value."""

    underflow: float
    """Magnitudes up to this one become zero."""
    tiny: float
    """The smallest normal value, as torch.finfo has it."""
    max: float
    """The largest value."""
    overflow: float
    """Magnitudes from this one up become infinite."""


DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)


def format_of(dtype: torch.dtype) -> Format:
    """Return the bounds of a dtype.

    Raises:
        TypeError: dtype is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype!r}")
    info = torch.finfo(dtype)
    smallest_subnormal = info.tiny * info.eps
    step_at_max = 2.0 ** math.floor(math.log2(info.max)) * info.eps
    return Format(
        underflow=smallest_subnormal / 2,
        tiny=info.tiny,
        max=info.max,
        overflow=info.max + step_at_max / 2,
    )
