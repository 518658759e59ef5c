"""The loss scale that a run's backward passes recommend for a dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch

from funcamp.numerics.counting import WIDTH
from funcamp.numerics.statistics import Stats
from funcamp.report.numbers.backward_passes import BackwardPass, Operation, amaxes
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
    """The fraction of all values that were zero at every recorded scale: due to the model (a ReLU, a mask), or flushed
    at each of them. Not part of the two fractions above; a pass in float32 distinguishes the two causes."""
    bounded_by: str
    """The operation with the largest gradients, and its place."""
    is_upper_bound: bool = False
    """Whether gradients overflowed and could not be measured: the right scale may then be smaller."""


class Evidence(NamedTuple):
    """What the recorded backward passes show of gradients in a dtype."""

    operations: list[Operation]
    ran_in_dtype: bool
    """Whether they ran in this dtype; otherwise they are those of all dtypes, except values of shape ()."""
    overflowed_scales: list[float]
    """The loss scales of passes that overflowed and could not be repeated."""

    def amaxes(self) -> list[float]:
        """Return the largest magnitude of each operation, without loss scaling."""
        return [amax / one.loss_scale for amax, one in zip(amaxes(self.operations), self.operations)]


def evidence_of(passes: list[BackwardPass], dtype: torch.dtype) -> Evidence:
    """Return the operations of all backward passes that bound the loss scale for a dtype."""
    operations: list[Operation] = []
    overflowed_scales = []
    for backward_pass in passes:
        operations += backward_pass.evidence
        if backward_pass.obstacle and not backward_pass.finite:
            overflowed_scales.append(backward_pass.loss_scale)
    in_dtype = [operation for operation in operations if operation.dtype == dtype]
    if in_dtype and not overflowed_scales:
        return Evidence(in_dtype, True, [])
    # The loss itself, of shape (), is in float32.
    with_shape = [operation for operation in operations if operation.shape]
    return Evidence(with_shape, False, overflowed_scales)


def largest_allowed_scale(passes: list[BackwardPass], evidence: Evidence, amax: float, largest_power: float) -> float:
    """Return the largest loss scale that the recorded passes allow, without headroom.

    amax: the largest magnitude of the evidence, without loss scaling; 0 if it is unknown.
    largest_power: the largest power of two of the dtype.
    """
    measured = [backward_pass.largest_scale for backward_pass in passes if backward_pass.largest_scale is not None]
    bounds = [2.0**127]
    bounds += [scale / 2 for scale in evidence.overflowed_scales]
    if evidence.ran_in_dtype:
        bounds += measured
    all_are_measured = evidence.ran_in_dtype and len(measured) == len(passes)
    if amax and not all_are_measured:
        bounds.append(largest_power / amax)
    return min(bounds)


def unscaled_stats(operations: list[Operation]) -> Stats:
    """Return all values of operations, without loss scaling."""
    by_loss_scale: dict[float, Stats] = {}
    for operation in operations:
        stats = Stats(operation.stats.row.cpu())
        scale = operation.loss_scale
        by_loss_scale[scale] = by_loss_scale.get(scale, NO_VALUES) + stats
    total = NO_VALUES
    for scale, stats in by_loss_scale.items():
        total = total + stats.rescale(1 / scale)
    return total


def advice_sentences(advice: Recommendation, dtype: torch.dtype) -> list[str]:
    """Return the sentences of a summary on the recommended loss scale."""
    scale = power(advice.scale)
    largest = "largest gradients, which bound it"
    if advice.is_upper_bound:
        scale = f"at most {scale}"
        largest = "largest finite gradients"
    sentence = (
        f"Loss scale for {name_of(dtype)}: {scale}, which leaves room for gradients twice as large. With it "
        f"{100 * advice.underflow:.3g} % of the gradients' values are flushed to zero, "
        f"unscaled {100 * advice.underflow_unscaled:.3g} %."
    )
    if advice.zero > 0.01:
        sentence += f" {100 * advice.zero:.3g} % more are zero at each scale seen."
    return [sentence, f"The {largest}: {advice.bounded_by or 'none'}."]
