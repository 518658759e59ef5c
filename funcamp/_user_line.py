"""What a user is told of a step that reads the host, and which line of it does."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import torch

READS = "not read a tensor's value on the host (no .item(), no branch on a tensor, no shape that follows from values)"
INSTEAD = "take torch.where or a mask of fixed shape instead, and return in the metrics what you want to read"
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def in_traceback(error: BaseException) -> str:
    """The innermost line of an error's traceback that is the user's."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _last(found)


def in_text(text: str) -> str:
    """The last such line that a printed traceback names."""
    return _last([(name, int(line)) for name, line in _FRAME.findall(text)])


def _last(frames: list[tuple[str, int]]) -> str:
    for name, line in reversed(frames):
        if not name.startswith(_OURS):
            return f"{name}:{line} ({linecache.getline(name, line).strip()})"
    return "a line that is not known"
