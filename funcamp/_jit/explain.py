"""Print what is done to a program before it is compiled, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Pass, Target
from funcamp._upstream.bugs import BUGS
from funcamp._upstream.bugs.bug import Bug


def names() -> frozenset[str]:
    """Return the names of all passes and corrections: what `without` may hold."""
    changes: list[Pass | Bug] = [*pipeline(), *BUGS]
    return frozenset(change.name for change in changes)


def lines(target: Target, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each pass, and each correction of torch, that a program for this target gets, in order."""
    for program_pass in pipeline():
        if program_pass.where(target):
            yield _line("pass", program_pass, without)
    for bug in BUGS:
        if target.by_inductor and bug.defect.present:
            yield _line("torch", bug, without)


def _line(kind: str, change: Pass | Bug, without: frozenset[str]) -> str:
    left_out = " (left out)" if change.name in without else ""
    return f"{kind}  {change.name:<34}  {change.why}{left_out}"


def explain(target: Target, without: frozenset[str]) -> None:
    """Print these lines to stderr."""
    devices = ", ".join(sorted(target.devices))
    title = f"funcamp.jit: a program for {target.backend} on {devices}:"
    sys.stderr.write("\n  ".join([title, *lines(target, without)]) + "\n")
