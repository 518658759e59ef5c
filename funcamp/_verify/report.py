"""What `verify` found, as values and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from funcamp._verify.compare import Difference


class Outcome(Enum):
    """How two roads compare."""

    EQUAL = "equal"
    ROUNDING = "equal within rounding"
    NOISE = "lost in rounding"
    DIFFERENT = "DIFFERENT"
    REFUSED = "REFUSED"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Comparison:
    """Two roads, and how they compare."""

    reference: str
    """The road that is taken for right."""
    road: str
    outcome: Outcome
    difference: Difference | None = None
    """The largest difference, in the first step in which there is more than rounding; None if all values are equal."""
    reason: str = ""
    """The error of a road that was refused, or why a road was left out."""

    def detail(self) -> str:
        """Return the difference or the reason as text."""
        if self.difference is None:
            return self.reason
        found = self.difference
        if found.allowed == math.inf:
            return f"{found.size:.0e}, in a value that is noise, {found.name}, step {found.step}"
        if found.is_rounding:
            return f"{found.size:.0e} of {found.allowed:.0e} allowed, {found.name}, step {found.step}"
        return f"from step {found.step} on: {found.name} by {found.size:.1e}, {found.allowed:.0e} allowed"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; prints as a table."""

    comparisons: tuple[Comparison, ...]
    steps: int
    skipped: tuple[int, ...]
    """The numbers of the steps that were skipped."""
    overflow: int | None
    """The step whose scale was too high on purpose; None if the policy does not compute in float16."""
    causes: tuple[str, ...]
    """What may explain the differences, the likeliest first; empty if there are none."""
    notes: tuple[str, ...]
    """What differs from torch's loop by design, for this step."""

    @property
    def ok(self) -> bool:
        """Return whether every road that was run agrees, bit for bit or within rounding."""
        return not any(one.outcome in (Outcome.DIFFERENT, Outcome.REFUSED) for one in self.comparisons)

    def summary(self) -> str:
        """Return the outcomes in one line."""
        outcomes = ", ".join(f"{one.road}: {one.outcome.value}" for one in self.comparisons)
        return f"{self.steps} steps, {len(self.skipped)} skipped; {outcomes}"

    def __str__(self) -> str:
        skipped = ", ".join(map(str, self.skipped)) or "none"
        purpose = "" if self.overflow is None else f" (step {self.overflow} has a scale that is too high, on purpose)"
        lines = [f"{self.steps} steps; skipped: {skipped}{purpose}"]
        rows = [(f"{one.reference} - {one.road}", one.outcome.value, one.detail()) for one in self.comparisons]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"{pair:{widths[0]}}  {outcome:{widths[1]}}  {detail}".rstrip() for pair, outcome, detail in rows]
        lines += [f"likely cause: {cause}" for cause in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
