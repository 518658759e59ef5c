"""Find the line of a user's code that did something."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

READS = "not read a tensor's value on the host (no .item(), no branch on a tensor or a size that follows from values)"
FIXED = "take torch.where or a mask of fixed shape instead"
INSTEAD = f"{FIXED}, and return in the metrics what you want to read"
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def in_traceback(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback."""
    return _first_of_users(iter(_frames(error)))


def asks_whether_compiled(error: BaseException) -> bool:
    """Return whether an error came out of user code that asks if it is being compiled (by a name like is_compiling)."""
    codes = [frame.f_code for frame, _ in _frames(error) if not frame.f_code.co_filename.startswith(_OURS)]
    return any(name.endswith("compiling") for code in codes for name in code.co_names)


def in_stack(beside: tuple[str, ...] = ()) -> str:
    """Return the innermost line of user code in the current call stack, outside of files that start with `beside`."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _first_of_users(iter(frames), beside)


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of an error's traceback and their lines, the innermost first."""
    frames: list[tuple[FrameType, int]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def _first_of_users(frames: Iterator[tuple[FrameType, int]], beside: tuple[str, ...] = ()) -> str:
    for frame, line in frames:
        name = frame.f_code.co_filename
        if not name.startswith((*_OURS, *beside)):
            return f"{name}:{line} ({linecache.getline(name, line).strip()})"
    return "a line that is not known"
