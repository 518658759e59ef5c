"""Whether float8 can represent the tensors of a linear layer at their scales, from the counts of their exponents."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from funcamp.numerics.formats import format_of
from funcamp.numerics.statistics import Stats

#: The formats of inputs and weights, and of gradients.
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
#: The sizes that float8 products accept are multiples of this.
_MULTIPLE = 16


class Multiplied(NamedTuple):
    """What a linear layer multiplies: its inputs of all calls, and its weight."""

    input: Stats
    weight: Stats
    sizes: tuple[int, ...]


class Float8Layer(NamedTuple):
    """The fractions of a linear layer that float8 loses, from `NumericsReport.float8`."""

    path: str
    input: float
    """Of the input, in E4M3."""
    weight: float
    """Of the weight, in E4M3."""
    gradient: float
    """Of the gradient of the output, in E5M2; NaN if there is none."""
    keep: str
    """Why the layer should stay in higher precision; "" if float8 suffices."""

    def __str__(self) -> str:
        advice = f"keep it, {self.keep}" if self.keep else "float8 holds it"
        lost = ", ".join(f"{name} {100 * getattr(self, name):.2g} %" for name in ("input", "weight", "gradient"))
        return f"{self.path or 'the module'}: {advice} (lost: {lost})"


def fit(path: str, multiplied: Multiplied, gradient: Stats, most: float) -> Float8Layer:
    """Return how well float8 represents a layer, with the scale of each tensor's own largest magnitude.

    gradient: of the layer's output; empty if there is none.
    most: the largest fraction of values that the layer may lose.
    """
    tensors = {
        "input": (multiplied.input, _FORWARD, "E4M3"),
        "weight": (multiplied.weight, _FORWARD, "E4M3"),
        "gradient": (gradient, _BACKWARD, "E5M2"),
    }
    lost_fractions = {}
    reasons = []
    if any(size % _MULTIPLE for size in multiplied.sizes):
        reasons.append(f"its sizes {multiplied.sizes} are not multiples of {_MULTIPLE}")
    for name, (stats, dtype, format_name) in tensors.items():
        lost_fractions[name] = _lost_fraction(stats, dtype)
        if stats.nonfinite > 0:
            reasons.append(f"its {name} has values that are not finite")
        elif lost_fractions[name] > most:
            reasons.append(f"{format_name} loses {100 * lost_fractions[name]:.2g} % of its {name}")
    return Float8Layer(path, **lost_fractions, keep="; ".join(reasons))


def _current_scale(stats: Stats, dtype: torch.dtype) -> float:
    """Return the scale of the tensor's own largest magnitude, rounded down to a power of two."""
    amax = stats.amax.item()  # rounded up to a power of two
    if not amax:
        return 1.0
    largest_power = 2.0 ** math.floor(math.log2(format_of(dtype).max))
    return largest_power / amax


def _lost_fraction(stats: Stats, dtype: torch.dtype) -> float:
    """Return the fraction of values that become zero at the current scale; NaN of no values."""
    if not stats.count > 0:
        return math.nan
    return stats.underflow(dtype, min(_current_scale(stats, dtype), 2.0**127)).item()
