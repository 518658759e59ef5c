"""Defects of torch that are worked around by changing torch while a program is compiled: a file each."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from funcamp._upstream.bugs import (
    declared_twice,
    list_of_one,
    lost_errors,
    lost_keywords,
    lost_nan,
    lost_order,
    mixed_transposes,
    unnamed_index,
    unrounded,
)
from funcamp._upstream.bugs.bug import Bug

BUGS: tuple[Bug, ...] = (
    lost_order.BUG,
    unrounded.BUG,
    declared_twice.BUG,
    lost_errors.BUG,
    list_of_one.BUG,
    lost_keywords.BUG,
    lost_nan.BUG,
    unnamed_index.BUG,
    mixed_transposes.BUG,
)


@contextlib.contextmanager
def corrected(without: Collection[str] = ()) -> Iterator[None]:
    """Context manager: torch without those of these defects that this version has."""
    with contextlib.ExitStack() as stack:
        for bug in BUGS:
            if bug.defect.present and bug.name not in without:
                stack.enter_context(bug.changed())
        yield
