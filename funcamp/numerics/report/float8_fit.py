"""Whether float8 holds the tensors of a linear layer at their scales, from the counts of their exponents."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from funcamp.float8.config import BACKWARD, FORWARD, MULTIPLE, fits
from funcamp.numerics.formats import format_of
from funcamp.numerics.statistics import Stats


class Multiplied(NamedTuple):
    """What a linear layer multiplies: its inputs of all calls, and its weight."""

    input: Stats
    weight: Stats
    sizes: tuple[int, ...]


class Float8Layer(NamedTuple):
    """How float8 holds a linear layer, from `NumericsReport.float8`: the fractions that it loses."""

    path: str
    input: float
    """Of the input, in E4M3."""
    weight: float
    """Of the weight, in E4M3."""
    gradient: float
    """Of the gradient of the output, in E5M2; NaN if there is none."""
    keep: str
    """Why the layer should stay in higher precision; "" if float8 holds it."""

    def __str__(self) -> str:
        lost = ", ".join(f"{name} {100 * getattr(self, name):.2g} %" for name in ("input", "weight", "gradient"))
        return (
            f"{self.path or 'the module'}: {f'keep it, {self.keep}' if self.keep else 'float8 holds it'} (lost: {lost})"
        )


def fit(path: str, multiplied: Multiplied, gradient: Stats, scales: Tensor | None, most: float) -> Float8Layer:
    """Return how float8 holds a layer."""
    counted = {
        "input": (multiplied.input, FORWARD),
        "weight": (multiplied.weight, FORWARD),
        "gradient": (gradient, BACKWARD),
    }
    lost, reasons = {}, []
    if not fits(multiplied.sizes):
        reasons.append(f"its sizes {multiplied.sizes} are not multiples of {MULTIPLE}")
    for place, (name, (stats, dtype)) in enumerate(counted.items()):
        amax = stats.amax.item()
        if scales is None:
            scale = 2.0 ** math.floor(math.log2(format_of(dtype).max)) / amax if amax else 1.0
        else:
            scale = scales[place].item()
        scale = min(scale, 2.0**127)
        lost[name] = (
            (stats.underflow(dtype, scale) + stats.overflow(dtype, scale / 2)).item() if stats.count > 0 else math.nan
        )
        kind = "E5M2" if dtype == BACKWARD else "E4M3"
        if stats.nonfinite > 0:
            reasons.append(f"its {name} has values that are not finite")
        elif lost[name] > most:
            reasons.append(f"{kind} loses {100 * lost[name]:.2g} % of its {name}")
    return Float8Layer(path, **lost, keep="; ".join(reasons))
