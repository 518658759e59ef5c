"""Print what is done to a program before it is compiled, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from funcamp._jit.options import OPTIONS
from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Target
from funcamp._upstream.bugs import BUGS


def names() -> frozenset[str]:
    """Return the names of all passes, options and corrections: what `without` may hold."""
    return frozenset(
        [
            *(one.name for one in pipeline()),
            *(option.names[0] for option in OPTIONS),
            *(bug.name for bug in BUGS),
        ]
    )


def lines(target: Target, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each change that a program for this target gets, in order."""
    kinds = [
        *(("pass", one.name, one.why) for one in pipeline() if one.where(target)),
    ]
    if target.by_inductor:
        kinds += [("option", option.names[0], option.why) for option in OPTIONS if option.where(target)]
        kinds += [
            ("torch", bug.name, bug.why) for bug in BUGS if bug.defect.present and (target.exact or not bug.only_exact)
        ]
    for kind, name, why in kinds:
        left_out = " (left out)" if name in without else ""
        yield f"{kind:<6}  {name:<34}  {why}{left_out}"


def explain(target: Target, without: frozenset[str]) -> None:
    """Print these lines to stderr."""
    devices = ", ".join(sorted(target.devices))
    text = [f"funcamp.jit: a program for {target.backend} on {devices}:", *lines(target, without)]
    sys.stderr.write("\n  ".join(text) + "\n")
