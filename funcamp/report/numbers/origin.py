"""Where the first non-finite value of a run comes from."""

from __future__ import annotations

from typing import NamedTuple

from funcamp._types import name_of
from funcamp.report.numbers.backward_passes import Operation


class Origin(NamedTuple):
    """The origin of a non-finite value, from `NumericsReport.first_nonfinite`."""

    operation: Operation
    kind: str
    """inf or NaN."""
    made: bool
    """Whether the operation created it; otherwise a parameter or the batch had it, and it first showed there."""

    def __str__(self) -> str:
        came = "first in" if self.made else "came in with a parameter or the batch, first seen in"
        return f"{self.kind} {came} {describe(self.operation)}"


def find_origin(operations: list[Operation], *, any_infinity: bool = False) -> Origin | None:
    """Return the first operation that created inf or NaN; else the first with NaN, or any_infinity."""
    for operation in operations:
        kinds = created_kinds(operation)
        if kinds:
            return Origin(operation, kinds[0], True)
    for operation in operations:
        if operation.stats.nan > 0:
            return Origin(operation, "NaN", False)
        if any_infinity and operation.stats.nonfinite > 0:
            return Origin(operation, "inf", False)
    return None


def created_kinds(operation: Operation) -> list[str]:
    """Return which non-finite values an operation created: inf, NaN, both or none."""
    flags = operation.creates.tolist()
    return [kind for kind, is_created in zip(("inf", "NaN"), flags) if is_created]


def describe(operation: Operation) -> str:
    """Return an operation as text: its name, direction, module, dtype and shape, and the line that called it."""
    direction = "backward" if operation.backward else "forward"
    place = operation.path or "outside of layers"
    description = f"{operation.name} ({direction}, {place}, {name_of(operation.dtype)}, shape {operation.shape})"
    if operation.line is None:
        return description
    file, line_number = operation.line
    return f"{description} at {file}:{line_number}"
