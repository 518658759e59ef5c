"""A module of Python that keeps a count and a function, as a user's own module may."""

from __future__ import annotations

import itertools

count = 0
calls = itertools.count(1)


def bump() -> int:
    """Count a call."""
    global count
    count += 1
    return count
