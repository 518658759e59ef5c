"""One output of one operation of a run, and what several of them have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch

from funcamp.numerics.statistics import Stats
from funcamp.report.lines import Line


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
    gets_infinity: bool = False
    """Whether an input contained inf, if the output is not finite."""
    line: Line | None = None
    """The line that called it, or that called the operation whose backward pass it is part of; None if unknown. Lines
    of torch and of this library are skipped."""

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether it ran in a format that needs loss scaling: float16 or float8."""
        return torch.finfo(self.dtype).max < 2.0**20


class BackwardPass(NamedTuple):
    """A backward pass of the run."""

    loss_scale: float
    loss_is_finite: bool
    """Whether the loss is finite before scaling."""
    operations: list[Operation]

    @property
    def overflows(self) -> bool:
        """Whether a gradient is inf or NaN."""
        return bool(self.operations) and bool((stacked(self.operations).nonfinite > 0).any())


def stacked(operations: list[Operation]) -> Stats:
    """Return the statistics of one or more operations as a batch, which is read at once."""
    return Stats(torch.stack([operation.stats.row.cpu() for operation in operations]))


def amaxes(operations: list[Operation]) -> list[float]:
    """Return the largest magnitude of each operation's output without loss scaling, rounded up to a power of two."""
    if not operations:
        return []
    scales = [operation.loss_scale for operation in operations]
    return [amax / scale for amax, scale in zip(stacked(operations).amax.tolist(), scales)]
