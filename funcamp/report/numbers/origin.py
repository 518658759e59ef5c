"""Where the first non-finite value of a run comes from."""

from __future__ import annotations

from typing import NamedTuple

from funcamp.report.numbers.operation import Operation
from funcamp.report.torch_names import name_of


class Origin(NamedTuple):
    """The origin of a non-finite value, from `NumericsReport.first_nonfinite`."""

    operation: Operation
    kind: str
    """inf or NaN."""
    made: bool
    """Whether the operation created it; otherwise a parameter or the batch had it, and it first showed there."""

    def __str__(self) -> str:
        came = "first in" if self.made else "came in with a parameter or the batch, first seen in"
        cause = ", from an input with inf" if self.operation.gets_infinity else ""
        return f"{self.kind} {came} {describe(self.operation)}{cause}"


def find_origin(operations: list[Operation], *, any_infinity: bool = False) -> Origin | None:
    """Return the first operation that created inf or NaN; else the first with NaN, or any_infinity."""
    for operation in operations:
        if operation.creates:
            return Origin(operation, operation.creates.split()[0], True)
    for operation in operations:
        if operation.stats.nan > 0:
            return Origin(operation, "NaN", False)
        if any_infinity and operation.stats.nonfinite > 0:
            return Origin(operation, "inf", False)
    return None


def describe(operation: Operation) -> str:
    """Return an operation as text: its name, direction, module, dtype and shape, and the line that called it."""
    direction = "backward" if operation.backward else "forward"
    place = operation.path or "outside of layers"
    description = f"{operation.name} ({direction}, {place}, {name_of(operation.dtype)}, shape {operation.shape})"
    return description if operation.line is None else f"{description} at {operation.line}"
