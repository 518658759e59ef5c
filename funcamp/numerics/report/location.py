"""Where an operation was called: its module, and the line of the user's code."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Location(NamedTuple):
    """Where an operation was called."""

    path: str | None
    """The module; empty outside modules; None if the operation is in no differentiated pass, and not recorded."""
    line: tuple[str, int] | None
    """The file and the line."""


def innermost_user_line() -> tuple[str, int] | None:
    """Return the innermost current line outside torch and this library."""
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None  # another Python than CPython may have none
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "funcamp"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
