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
        step, name, size, allowed = self.difference
        if allowed == math.inf:
            return f"{size:.0e}, in a value that is noise, {name}, step {step}"
        if self.difference.is_rounding:
            return f"{size:.0e} of {allowed:.0e} allowed, {name}, step {step}"
        return f"from step {step} on: {name} by {size:.1e}, {allowed:.0e} allowed"


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
        return not any(comparison.outcome in (Outcome.DIFFERENT, Outcome.REFUSED) for comparison in self.comparisons)

    def summary(self) -> str:
        """Return the outcomes in one line."""
        outcomes = ", ".join(f"{comparison.road}: {comparison.outcome.value}" for comparison in self.comparisons)
        return f"{self.steps} steps, {len(self.skipped)} skipped; {outcomes}"

    def __str__(self) -> str:
        skipped = ", ".join(map(str, self.skipped)) or "none"
        purpose = "" if self.overflow is None else f" (step {self.overflow} has a scale that is too high, on purpose)"
        lines = [f"{self.steps} steps; skipped: {skipped}{purpose}"]
        rows: list[tuple[str, str, str]] = []
        for comparison in self.comparisons:
            roads = f"{comparison.reference} - {comparison.road}"
            rows.append((roads, comparison.outcome.value, comparison.detail()))
        roads_width = max(len(roads) for roads, _, _ in rows)
        outcome_width = max(len(outcome) for _, outcome, _ in rows)
        for roads, outcome, detail in rows:
            lines.append(f"{roads:{roads_width}}  {outcome:{outcome_width}}  {detail}".rstrip())
        lines += [f"likely cause: {cause}" for cause in self.causes]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
