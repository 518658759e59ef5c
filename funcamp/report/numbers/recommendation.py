"""The loss scale that a run's backward passes recommend for a dtype."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from funcamp.numerics.counting import WIDTH
from funcamp.numerics.formats import format_of
from funcamp.numerics.statistics import Stats
from funcamp.report.numbers.operation import BackwardPass, amaxes, stacked
from funcamp.report.numbers.origin import describe
from funcamp.report.numbers.render import power
from funcamp.report.torch_names import name_of

NO_VALUES = Stats(torch.zeros(WIDTH, dtype=torch.float64))


class Recommendation(NamedTuple):
    """A loss scale, and its effect on the gradients of the pass."""

    scale: float
    """A power of two."""
    underflow: float
    """The fraction of the backward pass's finite nonzero values that become zero at that scale."""
    underflow_unscaled: float
    """The same at scale 1."""
    zero: float
    """The fraction of all values that were zero in the run: due to the model (a ReLU, a mask), or flushed. Not part of
    the two fractions above; a pass in float32 distinguishes the two causes."""
    bounded_by: str
    """The operation with the largest gradients, and its place."""
    is_upper_bound: bool = False
    """Whether gradients overflowed, so that only the finite ones are known: the right scale may then be smaller."""


def recommend(passes: list[BackwardPass], dtype: torch.dtype, headroom: float) -> Recommendation | None:
    """Return the largest power of two at which no gradient overflows, divided by headroom; None without gradients."""
    recorded = [operation for one in passes for operation in one.operations]
    overflowed_scales = [one.loss_scale for one in passes if one.overflows]
    operations = [one for one in recorded if one.dtype == dtype]
    if overflowed_scales or not operations:  # the loss itself, of shape (), is in float32
        operations = [one for one in recorded if one.shape]
    magnitudes = amaxes(operations)
    amax = max(magnitudes, default=0.0)
    if not amax:
        return None
    bounds = [2.0**127, 2.0 ** math.floor(math.log2(format_of(dtype).max)) / amax]
    bounds += [scale / 2 for scale in overflowed_scales]
    scale = 2.0 ** math.floor(math.log2(min(bounds) / headroom))
    loss_scales = torch.tensor([one.loss_scale for one in operations], dtype=torch.float64)
    gradients = stacked(operations).rescale(1 / loss_scales).total()
    zeros = gradients.poszero + gradients.negzero
    return Recommendation(
        scale=scale,
        underflow=gradients.underflow(dtype, scale).item(),
        underflow_unscaled=gradients.underflow(dtype, 1.0).item(),
        zero=(zeros / gradients.count.clamp(min=1)).item(),
        bounded_by=describe(operations[magnitudes.index(amax)]),
        is_upper_bound=bool(overflowed_scales),
    )


def sentences_of(advice: Recommendation, dtype: torch.dtype) -> list[str]:
    """Return the sentences of a summary on the recommended loss scale."""
    scale, largest = power(advice.scale), "largest gradients, which bound it"
    if advice.is_upper_bound:
        scale, largest = f"at most {scale}", "largest finite gradients"
    sentence = (
        f"Loss scale for {name_of(dtype)}: {scale}, which leaves room for gradients twice as large. With it "
        f"{100 * advice.underflow:.3g} % of the gradients' values are flushed to zero, "
        f"unscaled {100 * advice.underflow_unscaled:.3g} %."
    )
    if advice.zero > 0.01:
        sentence += f" {100 * advice.zero:.3g} % more are zero in this run."
    return [sentence, f"The {largest}: {advice.bounded_by}."]
