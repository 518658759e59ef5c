"""Lines of the user's code: where a call comes from."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_FUNCAMP = f"{Path(__file__).parent.parent}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
#: The starts of the names of files that are not the user's: torch's, this library's, and code that is in no file.
_NOT_USERS = (_TORCH, _FUNCAMP, "<")
#: The starts of the names of files through which an operation reaches a mode.
_PASSING_ON = (
    _FUNCAMP,
    *[f"{_TORCH}{name}" for name in ("_compile.py", "_dynamo", "_tensor.py", "_ops.py", "overrides.py", "utils")],
)
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
#: Installed packages are below the standard library's folder in some layouts.
_INSTALLED = ("site-packages", "dist-packages")

_PRODUCTS = (ast.BinOp, ast.AugAssign)


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


UNKNOWN = Line("unknown", 0)


class CallSite(NamedTuple):
    """Where a function is in its code: two calls on one line are two call sites."""

    line: Line
    instruction: int
    """The instruction that runs, by its position in the function's bytecode."""


def calling_line() -> Line:
    """Return the user's line that runs now, the innermost one: not of torch, this library or the standard library."""
    for frame in _user_frames():
        return Line(frame.f_code.co_filename, frame.f_lineno)
    return UNKNOWN


def call_sites() -> tuple[CallSite, ...]:
    """Return where each function of the user that runs now is, the outermost first."""
    frames = [*_user_frames()][::-1]
    return tuple([CallSite(Line(frame.f_code.co_filename, frame.f_lineno), frame.f_lasti) for frame in frames])


def is_factor(name: str, line: Line) -> bool:
    """Return whether the result of a method's call on a line is multiplied or divided, as far as the source shows.

    What a function returns is a factor: its callers may multiply by it.
    """
    calls = [node for node in _parents(line.file) if isinstance(node, ast.Call) and _contains(node, line)]
    of_method = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
    return any(_is_used_as_factor(call, line.file) for call in of_method)


def _is_used_as_factor(value: ast.AST, file: str) -> bool:
    """Return whether a value is used in a product or returned, or assigned to a name that is a factor somewhere.

    Also what a function returns that gets it, such as `float`.
    """
    use = _use_of(value, _parents(file))
    if isinstance(use, ast.Call):
        return _is_used_as_factor(use, file)
    if isinstance(use, ast.Assign):
        return _is_name_factor(use.targets, file)
    if isinstance(use, ast.AnnAssign):
        return _is_name_factor([use.target], file)
    return _is_product(use) or isinstance(use, ast.Return)


def _use_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    """Return the innermost product, call or statement around an expression."""
    while node in parents:
        node = parents[node]
        if _is_product(node) or isinstance(node, (ast.Call, ast.stmt)):
            break
    return node


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, _PRODUCTS) and isinstance(node.op, (ast.Mult, ast.Div))


def _is_name_factor(targets: list[ast.expr], file: str) -> bool:
    """Return whether a name that is assigned is a factor somewhere in the file."""
    names = {_name_of(target) for target in targets}
    products = [node for node in _parents(file) if _is_product(node)]
    return any(_name_of(part) in names for product in products for part in ast.walk(product))


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a variable, or of an attribute with a dot; None for any other expression."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


@functools.cache
def _parents(file: str) -> dict[ast.AST, ast.AST]:
    """Return the parent of each node of a file; none if it cannot be parsed."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    return {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}


def _contains(node: ast.Call, line: Line) -> bool:
    return node.lineno <= line.number <= (node.end_lineno or 0)


def is_called_by_torch() -> bool:
    """Return whether a Python function of torch, such as `F.normalize`, made the call or operation that runs now.

    Modes, operators and what passes an operation to a mode are none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSING_ON):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _user_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.cache
def _is_users(file: str) -> bool:
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
    if file.startswith((*_NOT_USERS, generated)):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or any(name in file for name in _INSTALLED)
