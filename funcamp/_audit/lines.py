"""Lines of the user's code: where a call comes from."""

from __future__ import annotations

import ast
import functools
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
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
#: The starts of the names of files that are not the user's: torch's, this library's, and code that is in no file.
_NOT_USERS = (_TORCH, _FUNCAMP, "<")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
#: Installed packages are below the standard library's folder in some layouts.
_INSTALLED = ("site-packages", "dist-packages")

_LOOPS = (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


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
    """Return the user's line that runs now, the innermost one: not of torch, this library or the standard library."""
    for frame in _user_frames():
        return Line(frame.f_code.co_filename, frame.f_lineno)
    return UNKNOWN


def calling_lines() -> tuple[Line, ...]:
    """Return the user's lines of all functions that run now, the outermost first."""
    return tuple([Line(frame.f_code.co_filename, frame.f_lineno) for frame in _user_frames()])[::-1]


def are_in_one_loop(first: tuple[Line, ...], second: tuple[Line, ...]) -> bool:
    """Return whether the innermost loop around one call contains another call too; False without a loop.

    first, second: `calling_lines` of the two calls. The loop is looked for in the innermost function that made both,
    where the lines begin to differ.
    """
    for line, other in zip(first, second):
        if line != other:
            return line.file == other.file and _is_in_loop_of(line, other)
    return False


def _is_in_loop_of(line: Line, other: Line) -> bool:
    """Return whether the innermost loop around a line contains another line of the file."""
    surrounding = [node for node in _blocks(line.file) if _contains(node, line)]
    innermost = max(surrounding, key=lambda node: node.lineno, default=None)
    return isinstance(innermost, _LOOPS) and _contains(innermost, other)


@functools.cache
def _blocks(file: str) -> list[ast.expr | ast.stmt]:
    """Return the loops and functions of a file; none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []
    return [node for node in nodes if isinstance(node, (*_LOOPS, *_FUNCTIONS))]


def _contains(node: ast.expr | ast.stmt, line: Line) -> bool:
    return node.lineno <= line.number <= (node.end_lineno or 0)


def is_called_by_torch() -> bool:
    """Return whether torch itself called an observed function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_AUDITOR):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def is_called_by_funcamp() -> bool:
    """Return whether this library runs now, without the auditor, and no code of the user inside it.

    Functions that only pass on an operation (`__torch_function__`) do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    is_funcamps = False
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_function__":
            is_funcamps = False
        elif file.startswith(_FUNCAMP) and not file.startswith(_AUDITOR):
            is_funcamps = True
        elif _is_users(file):
            break
        frame = frame.f_back
    return is_funcamps


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
