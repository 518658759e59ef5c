"""Find the line of a user's code that did something."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

READS = "not read a tensor's value on the host (no .item(), no branch on a tensor or a size that follows from values)"
FIXED = "take torch.where or a mask of fixed shape instead"
INSTEAD = f"{FIXED}, and return in the metrics what you want to read"
#: Torch's modules that read values, by the start of their module's name, and what to take instead.
_READERS = {
    "torch.ao.quantization.": (
        "torch.ao.quantization, which branches on its buffers (FusedMovingAvgObsFakeQuantize of "
        "get_default_qat_qconfig does not)"
    ),
    "torch.nn.modules.batchnorm": (
        "torch.nn with momentum=None, which divides by its count of batches (momentum=0.1 reads nothing)"
    ),
}
_OURS = (*(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent)), "<")


def in_traceback(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback."""
    return _first_of_users(_innermost_first(error))


def asks_whether_compiled(error: BaseException) -> bool:
    """Return whether an error came out of user code that asks if it is being compiled (by a name like is_compiling)."""
    codes = [frame.f_code for frame, _ in _innermost_first(error)]
    names = [name for code in codes if not code.co_filename.startswith(_OURS) for name in code.co_names]
    return any(name.endswith("compiling") for name in names)


def in_nested_tensor(error: BaseException) -> bool:
    """Return whether an error came out of torch's code for nested tensors."""
    folder = f"{Path(torch.nested.__file__).parent}{os.sep}"
    return any(frame.f_code.co_filename.startswith(folder) for frame, _ in _innermost_first(error))


def in_stack(beside: tuple[str, ...] = ()) -> str:
    """Return the innermost line of user code in the current call stack, outside of files that start with `beside`."""
    return _first_of_users(traceback.walk_stack(sys._getframe(1)), beside)


def _innermost_first(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    return reversed([*traceback.walk_tb(error.__traceback__)])


def _first_of_users(frames: Iterator[tuple[FrameType, int]], beside: tuple[str, ...] = ()) -> str:
    reader = ""
    for frame, line in frames:
        name = frame.f_code.co_filename
        if not name.startswith((*_OURS, *beside)):
            return f"{reader}{name}:{line} ({linecache.getline(name, line).strip()})"
        if not reader:  # the line of the user calls a model, and what reads is a module of torch in it
            module = str(frame.f_globals.get("__name__"))
            kind = type(frame.f_locals.get("self")).__name__
            reads = next((text for start, text in _READERS.items() if module.startswith(start)), None)
            reader = f"{kind} of {reads}, called in " if reads else ""
    return "a line that is not known"
