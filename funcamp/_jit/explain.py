"""Print what is done to a program before it is compiled, and why."""

from __future__ import annotations

import sys

from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Target


def names() -> frozenset[str]:
    """Return the names of all passes: what `without` may hold."""
    return frozenset(program_pass.name for program_pass in pipeline())


def explain(target: Target, without: frozenset[str]) -> None:
    """Print to stderr each pass that a program for this target gets, in order."""
    devices = ", ".join(sorted(target.devices))
    lines = [f"funcamp.jit: a program for {target.backend} on {devices}:"]
    for program_pass in pipeline():
        if program_pass.where(target):
            left_out = " (left out)" if program_pass.name in without else ""
            lines.append(f"{program_pass.name:<34}  {program_pass.why}{left_out}")
    sys.stderr.write("\n  ".join(lines) + "\n")
