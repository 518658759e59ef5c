"""Print what is done to a program before it is compiled, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from funcamp._jit.options import OPTIONS
from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Target
from funcamp._upstream.bugs import BUGS


def names() -> frozenset[str]:
    """Return the names of all passes, options and corrections: what `without` may hold."""
    return frozenset(
        [
            *(program_pass.name for program_pass in pipeline()),
            *(option.names[0] for option in OPTIONS),
            *(bug.name for bug in BUGS),
        ]
    )


class Change(NamedTuple):
    """Something that is done to a program."""

    kind: str
    """pass, option (of Inductor), or torch (a correction of torch)."""
    name: str
    why: str


def changes(target: Target) -> Iterator[Change]:
    """Yield what is done to a program for this target, in order."""
    for program_pass in pipeline():
        if program_pass.where(target):
            yield Change("pass", program_pass.name, program_pass.why)
    if not target.by_inductor:
        return
    for option in OPTIONS:
        if option.where(target):
            yield Change("option", option.names[0], option.why)
    for bug in BUGS:
        if bug.defect.present:
            yield Change("torch", bug.name, bug.why)


def lines(target: Target, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each change that a program for this target gets."""
    for change in changes(target):
        left_out = " (left out)" if change.name in without else ""
        yield f"{change.kind:<6}  {change.name:<34}  {change.why}{left_out}"


def explain(target: Target, without: frozenset[str]) -> None:
    """Print these lines to stderr."""
    devices = ", ".join(sorted(target.devices))
    title = f"funcamp.jit: a program for {target.backend} on {devices}:"
    sys.stderr.write("\n  ".join([title, *lines(target, without)]) + "\n")
