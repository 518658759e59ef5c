"""Print what is done to a program before it is compiled, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Target


def names() -> frozenset[str]:
    """Return the names of all passes: what `without` may hold."""
    return frozenset(program_pass.name for program_pass in pipeline())


def lines(target: Target, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each pass that a program for this target gets, in order."""
    for program_pass in pipeline():
        if program_pass.where(target):
            left_out = " (left out)" if program_pass.name in without else ""
            yield f"{program_pass.name:<34}  {program_pass.why}{left_out}"


def explain(target: Target, without: frozenset[str]) -> None:
    """Print these lines to stderr."""
    devices = ", ".join(sorted(target.devices))
    title = f"funcamp.jit: a program for {target.backend} on {devices}:"
    sys.stderr.write("\n  ".join([title, *lines(target, without)]) + "\n")
