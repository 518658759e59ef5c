"""One backward pass: its operations, and the loss scales at which its gradients are finite.

A backward pass is linear in its initial gradient. So a recorded pass is repeated with that gradient times a power of
two, which is the same as another loss scale: an overflow at one scale can be measured at another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp.numerics.statistics import Stats

#: Distance of the first repetition below a pass that overflowed; it doubles for each further one.
_STRIDE = 8


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
    creates: Tensor
    """Bool, shape (2,): whether it contains inf, or NaN, although no input did."""
    loss_scale: float
    """The factor of the loss at that time."""
    line: tuple[str, int] | None = None
    """The file and the line that called it, or that called the operation whose backward pass it is part of; None if
    unknown. Lines of torch and of this library are skipped."""


class Trial(NamedTuple):
    """A backward pass at one loss scale."""

    operations: list[Operation]
    finite: bool
    """Whether the gradients that it returns are finite, as a scaler checks."""
    gradients: dict[str, Stats]
    """The gradients of modules' outputs, by path, without loss scaling."""


class Pass(NamedTuple):
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
    """Its operations, each at the largest scale at which it was recorded without overflow. Without `largest_scale`: as
    at the smallest scale tried."""
    obstacle: str = ""
    """Why it could not be repeated, or empty."""


def largest(again: Callable[[int], Trial], lowest: int, highest: int) -> tuple[int | None, Trial]:
    """Find the largest k for which `again(k)`, the pass at 2^k times its scale, is finite.

    Args:
        again: runs the pass; `again(0)` is the run itself.
        lowest: the smallest k to try.
        highest: the largest.

    Returns:
        The k and its trial; None and the last trial if none is finite.
    """
    low = high = best = None
    place, stride = 0, _STRIDE
    while True:
        trial = again(place)
        if trial.finite:
            low, best = place, trial
            room = _room(trial.operations)
            if room is None and high is not None:  # all zero: no magnitude to estimate from
                place = (low + high) // 2
            else:
                place = min(low + (stride if room is None else max(room, 0)), highest if high is None else high - 1)
        else:
            high = place
            if low is not None:
                place = (low + high) // 2
            elif place <= lowest:
                return None, trial
            else:
                place = max(place - stride, lowest)
        stride *= 2
        if best is not None and place == low:
            return low, best


def _room(operations: list[Operation]) -> int | None:
    """Return how many doublings the finite values allow, each in its dtype; None if all are zero."""
    amaxes = [one.stats.amax.item() for one in operations]
    rooms = [
        math.frexp(torch.finfo(one.dtype).max)[1] - round(math.log2(amax))
        for one, amax in zip(operations, amaxes)
        if amax
    ]
    return min(rooms, default=None)


def combined(run: list[Operation], repeated: list[Operation]) -> list[Operation]:
    """Return a repeated pass's operations, or the run's (at a larger scale) if those are finite."""
    kept: dict[object, list[Operation]] = defaultdict(list)
    for one in reversed(run):
        kept[_place(one)].append(one)
    found = []
    for one in repeated:
        same = kept[_place(one)]
        larger = same.pop() if same else one
        found.append(one if larger.stats.nonfinite > 0 else larger)
    return found


def _place(one: Operation) -> object:
    return one.path, one.name, one.output, one.dtype, one.shape


def narrow(operations: list[Operation]) -> bool:
    """Return whether an operation ran in a format that needs loss scaling."""
    return any(torch.finfo(one.dtype).max < 2.0**20 for one in operations)
