"""A warning when step after step is skipped, in place of a silence in which nothing is learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable

#: So many skipped steps in a row lower a scale of 2^16 below 1: it is not the scale that is at fault.
LIMIT = 20


class SkipsInARow:
    """Warns once when `LIMIT` steps in a row were skipped.

    Args:
        call: what the warning begins with.
        depth: the number of functions between the user's line and `note` or `warn`.
    """

    def __init__(self, call: str, depth: int) -> None:
        self._call = call
        self._depth = depth
        self._counts: dict[object, int] = {}
        """How many steps in a row were skipped, by optimizer."""
        self._has_warned = False

    def note(self, optimizer: object, *, skipped: bool, describe: Callable[[], str]) -> None:
        """Count a step of an optimizer, and warn if it is the last of `LIMIT`.

        Args:
            optimizer: which one, as a key.
            skipped: whether its step was skipped.
            describe: returns what is not finite, for the warning; called only then.
        """
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1 if skipped else 0
        self.warn(self._counts[optimizer], describe)

    def warn(self, count: int, describe: Callable[[], str]) -> None:
        """Warn if so many steps in a row were skipped, and no warning came before."""
        if count < LIMIT or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._call}: {count} steps in a row were skipped, so nothing is learned: {describe()}. No scale "
            "helps if the loss is not finite or a gradient is inf or NaN at each scale; "
            "`funcamp.report.numerics_report` of one step names the operation",
            stacklevel=self._depth + 2,
        )
