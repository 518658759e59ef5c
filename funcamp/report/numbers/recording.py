"""What is recorded of a run, or of a backward pass that is repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from funcamp.numerics.record import Record, probe
from funcamp.report.numbers.backward_passes import Operation
from funcamp.numerics.statistics import Stats

_Sum = TypeVar("_Sum", Record, Stats)


@dataclasses.dataclass
class Recording:
    """The operations, and the counts of modules' outputs and of their gradients."""

    operations: list[Operation] = dataclasses.field(default_factory=list)
    records: dict[str, Record] = dataclasses.field(default_factory=dict)
    """The outputs of modules and their gradients, by path."""
    gradients: dict[str, Stats] = dataclasses.field(default_factory=dict)
    """The gradients of modules' outputs, by path, without loss scaling."""

    def add_output(self, path: str, counted: Stats) -> None:
        """Add the counts of a module's output."""
        _add(self.records, path, Record(counted, _empty_like(counted)))

    def add_gradient(self, path: str, counted: Stats, loss_scale: float) -> None:
        """Add the counts of the gradient of a module's output."""
        _add(self.gradients, path, counted.rescale(1 / loss_scale))
        _add(self.records, path, Record(_empty_like(counted), counted))

    def replace_gradients(self, before: dict[str, Stats], gradients: Mapping[str, Stats]) -> None:
        """Replace the gradients of the last backward pass.

        before: those of the passes before it, without loss scaling.
        gradients: those of the pass at another loss scale, without loss scaling.
        """
        self.gradients = before
        for path, gradient in gradients.items():
            _add(self.gradients, path, gradient)


def _empty_like(counted: Stats) -> Stats:
    return probe(counted.row.device).forward


def _add(sums: dict[str, _Sum], path: str, counted: _Sum) -> None:
    if path in sums:
        sums[path] = sums[path] + counted
    else:
        sums[path] = counted
