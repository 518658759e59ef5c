"""Find the line of a user's code that did something."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch

#: The starts of the file names of torch, of this library, and of code that is in no file. The separator is needed:
#: the folder of torchvision begins with torch, too.
_NOT_USERS = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parent.parent}{os.sep}",
    "<",
)


def line_in_traceback(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback."""
    return _first_user_line(_innermost_first(error))


def asks_whether_compiled(error: BaseException) -> bool:
    """Return whether an error came out of user code that asks if it is being compiled (by a name like is_compiling)."""
    names = [name for frame, _ in _innermost_first(error) if _is_users(frame) for name in frame.f_code.co_names]
    return any(name.endswith("compiling") for name in names)


def in_nested_tensor(error: BaseException) -> bool:
    """Return whether an error came out of torch's code for nested tensors."""
    folder = f"{Path(torch.nested.__file__).parent}{os.sep}"
    return any(frame.f_code.co_filename.startswith(folder) for frame, _ in _innermost_first(error))


def line_in_stack() -> str:
    """Return the innermost line of user code in the current call stack."""
    return _first_user_line(traceback.walk_stack(sys._getframe(1)))


def _innermost_first(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Return the frames and lines of a traceback, the one that raised first."""
    return reversed([*traceback.walk_tb(error.__traceback__)])


def _first_user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first line of user code among some frames and their lines, from the inside out."""
    for frame, line in frames:
        if _is_users(frame):
            file = frame.f_code.co_filename
            return f"{file}:{line} ({linecache.getline(file, line).strip()})"
    return "a line that is not known"


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame is of user code; what is typed, or given to `python -c`, is in no file."""
    return frame.f_globals.get("__name__") == "__main__" or not frame.f_code.co_filename.startswith(_NOT_USERS)
