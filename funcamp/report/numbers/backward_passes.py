"""One backward pass: its operations, and the loss scales at which its gradients are finite.

A backward pass is linear in its initial gradient. So a recorded pass is repeated with that gradient times a power of
two, which is the same as another loss scale: an overflow at one scale can be measured at another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from funcamp.numerics.statistics import Stats
from funcamp.report.lines import Line

#: Distance of the first repetition below a pass that overflowed; it doubles for each further one.
_STRIDE = 8


#: The gradients of modules' outputs, by path and loss scale.
Measured: TypeAlias = dict[tuple[str, float], Stats]


class Operation(NamedTuple):
    """One output of one operation recorded by `numerics_report`."""

    backward: bool
    path: str
    """The module whose forward pass called it, or whose backward pass it is part of; empty outside modules."""
    name: str
    """Its name among torch's operators: mm, add, native_layer_norm_backward."""
    output: int
    """The number of the output."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: Stats
    creates: str
    """What it contains although no input did: inf, NaN, both ("inf NaN") or nothing ("")."""
    loss_scale: float
    """The factor of the loss at that time."""
    line: Line | None = None
    """The file and the line that called it, or that called the operation whose backward pass it is part of; None if
    unknown. Lines of torch and of this library are skipped."""


class Trial(NamedTuple):
    """A backward pass at one loss scale."""

    operations: list[Operation]
    finite: bool
    """Whether the gradients that it returns are finite, as a scaler checks."""
    gradients: Measured


class BackwardPass(NamedTuple):
    """The findings about one backward pass of the run."""

    loss_scale: float
    loss_is_finite: bool
    """Whether the loss is finite before scaling."""
    finite: bool
    """Whether the gradients are finite in the run itself."""
    largest_scale: float | None
    """The largest loss scale, a power of two times the run's, at which its gradients are finite; None if there is none,
    or if the pass was not repeated."""
    evidence: list[Operation]
    """Its operations at the largest scale; without one, as at the smallest scale tried."""
    obstacle: str = ""
    """Why it could not be repeated, or empty."""


class Examination(NamedTuple):
    """What `examine_pass` returns."""

    findings: BackwardPass
    gradients: Measured | None = None
    """Those at the largest scale at which the pass is finite; None if those of the run itself are right."""


def examine_pass(
    operations: list[Operation],
    loss_scale: float,
    try_factor: Callable[[float], Trial],
    *,
    loss_is_finite: bool,
    initial_dtypes: list[torch.dtype],
    obstacle: str,
) -> Examination:
    """Return the findings about a pass, which is repeated if it overflowed or may overflow at a larger scale.

    Args:
        operations: those of the pass.
        loss_scale: the loss scale of the pass.
        try_factor: repeats the pass at its loss scale times a factor.
        loss_is_finite: whether the loss is finite before scaling.
        initial_dtypes: the dtypes of the initial gradients.
        obstacle: why the pass must not be repeated, or empty.
    """
    is_finite = not operations or not bool((stacked(operations).nonfinite > 0).any())
    needs_no_repetition = is_finite and not needs_loss_scaling(operations)
    if obstacle or not loss_is_finite or needs_no_repetition:
        return Examination(BackwardPass(loss_scale, loss_is_finite, is_finite, None, operations, obstacle))

    def try_exponent(exponent: int) -> Trial:
        if is_finite and exponent == 0:  # the run itself
            return Trial(operations, True, {})
        return try_factor(2.0**exponent)

    lowest, highest = exponents_to_try(initial_dtypes, loss_scale)
    try:
        exponent, best = find_largest_scale(try_exponent, lowest, highest)
    except Exception as error:  # of a user's hook, or of a function that allows only one backward pass
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Examination(BackwardPass(loss_scale, True, is_finite, None, operations, lines[0]))
    if exponent is None:
        return Examination(BackwardPass(loss_scale, True, False, None, best.operations))
    largest_scale = loss_scale * 2.0**exponent
    if exponent >= 0:
        return Examination(BackwardPass(loss_scale, True, True, largest_scale, best.operations))
    # The run overflowed, so the gradients of modules are those of the trial.
    findings = BackwardPass(loss_scale, True, False, largest_scale, best.operations)
    return Examination(findings, best.gradients)


def find_largest_scale(again: Callable[[int], Trial], lowest: int, highest: int) -> tuple[int | None, Trial]:
    """Find the largest k for which `again(k)`, the pass at 2^k times its scale, is finite.

    Args:
        again: runs the pass; `again(0)` is the run itself.
        lowest: the smallest k to try.
        highest: the largest.

    Returns:
        The k and its trial; None and the last trial if none is finite.
    """
    finite_at: int | None = None  # the largest k known to be finite
    overflow_at: int | None = None  # the smallest k known to overflow
    best: Trial | None = None
    exponent = 0
    stride = _STRIDE
    while True:
        trial = again(exponent)
        if trial.finite:
            finite_at = exponent
            best = trial
            limit = highest if overflow_at is None else overflow_at - 1
            doublings = _doublings_left(trial.operations)
            if doublings is not None:
                exponent = min(finite_at + max(doublings, 0), limit)
            elif overflow_at is None:  # all values are zero: there is no magnitude to estimate from
                exponent = min(finite_at + stride, limit)
            else:
                exponent = (finite_at + overflow_at) // 2
        else:
            overflow_at = exponent
            if finite_at is not None:
                exponent = (finite_at + overflow_at) // 2
            elif exponent <= lowest:
                return None, trial
            else:
                exponent = max(exponent - stride, lowest)
        stride *= 2
        if best is not None and exponent == finite_at:
            return finite_at, best


def _doublings_left(operations: list[Operation]) -> int | None:
    """Return how many doublings the finite values allow, each in its dtype; None if all are zero."""
    doublings = []
    for operation, amax in zip(operations, amaxes(operations)):
        if amax:
            largest_exponent = math.frexp(torch.finfo(operation.dtype).max)[1]
            doublings.append(largest_exponent - round(math.log2(amax)))
    return min(doublings, default=None)


def stacked(operations: list[Operation]) -> Stats:
    """Return the statistics of one or more operations as a batch, which is read at once."""
    return Stats(torch.stack([operation.stats.row.cpu() for operation in operations]))


def amaxes(operations: list[Operation]) -> list[float]:
    """Return the largest magnitude of each operation's output, rounded up to a power of two."""
    return stacked(operations).amax.tolist() if operations else []


def needs_loss_scaling(operations: list[Operation]) -> bool:
    """Return whether an operation ran in a format that needs loss scaling: float16 or float8."""
    return any(torch.finfo(operation.dtype).max < 2.0**20 for operation in operations)


def exponents_to_try(initial_dtypes: list[torch.dtype], loss_scale: float) -> tuple[int, int]:
    """Return the lowest and the highest k for which a pass is repeated with its initial gradients times 2^k.

    The initial gradients, and the loss scale times 2^k, must be normal numbers.
    """
    formats = [torch.finfo(dtype) for dtype in initial_dtypes]
    lowest = max([-120, *(math.frexp(info.tiny)[1] for info in formats)])
    largest_factor = min([127, *(math.frexp(info.max)[1] for info in formats)])
    highest = largest_factor - math.frexp(loss_scale)[1]
    return lowest, max(highest, 0)
