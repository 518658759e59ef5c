"""Lines of the user's code: where a call came from."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_AUDITOR = f"{Path(__file__).parent}{os.sep}"
_FUNCAMP = f"{Path(__file__).parent.parent}{os.sep}"
#: The starts of the names of files that call nothing on their own account: torch's, this library's, code in no file.
_NOT_USERS = (f"{Path(torch.__file__).parent}{os.sep}", _FUNCAMP, "<")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
#: Installed packages are below the standard library's folder in some layouts.
_INSTALLED = ("site-packages", "dist-packages")


class Line(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def is_installed(self) -> bool:
        """Whether it belongs to an installed package, which its user does not change."""
        return any(name in self.file for name in _INSTALLED)


UNKNOWN = Line("unknown", 0)


def calling_line() -> Line:
    """Return the innermost current line outside of torch, this library and Python's own files."""
    for frame in _user_frames():
        return Line(frame.f_code.co_filename, frame.f_lineno)
    return UNKNOWN


def calling_lines() -> int:
    """Return a number for all current lines outside of those files: equal for calls along one way."""
    return hash(tuple((frame.f_code.co_filename, frame.f_lineno) for frame in _user_frames()))


def is_called_by_funcamp() -> bool:
    """Return whether the innermost current line outside of torch is this library's, apart from the auditor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_FUNCAMP) and not file.startswith(_AUDITOR):
            return True
        if _is_users(file):
            return False
        frame = frame.f_back
    return False


def _user_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith(_NOT_USERS):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or any(name in file for name in _INSTALLED)
