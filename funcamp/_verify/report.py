"""What `verify` found, as values and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from funcamp._verify.rounding import Difference


class Outcome(Enum):
    """How two roads compare."""

    EQUAL = "equal"
    ROUNDING = "equal within rounding"
    DIFFERENT = "DIFFERENT"
    REFUSED = "REFUSED"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Comparison:
    """Two roads, and how they compare."""

    roads: str
    """Their names."""
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
        if self.outcome is Outcome.DIFFERENT:
            return f"from step {step} on: {name} by {size:.1e}, {allowed:.0e} allowed"
        limit = "of noise" if allowed > 1 else f"of {allowed:.0e} allowed"
        return f"{size:.0e} {limit}, {name}, step {step}"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; prints as a table."""

    comparisons: tuple[Comparison, ...]
    steps: int
    skipped: tuple[int, ...]
    """The numbers of the steps that were skipped."""
    overflow: int | None
    """The step whose scale was too high on purpose; None if the policy does not compute in float16."""
    notes: tuple[str, ...]
    """What may explain differences, what was not compared, and what differs from torch's loop by design."""

    @property
    def ok(self) -> bool:
        """Return whether every road that was run agrees, bit for bit or within rounding."""
        return not any(comparison.outcome in (Outcome.DIFFERENT, Outcome.REFUSED) for comparison in self.comparisons)

    def __str__(self) -> str:
        skipped = ", ".join(map(str, self.skipped)) or "none"
        purpose = "" if self.overflow is None else f" (step {self.overflow} has a scale that is too high, on purpose)"
        lines = [f"{self.steps} steps; skipped: {skipped}{purpose}"]
        width = max(len(one.roads) for one in self.comparisons)
        for one in self.comparisons:
            lines.append(f"{one.roads:{width}}  {one.outcome.value:21}  {one.detail()}".rstrip())
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
