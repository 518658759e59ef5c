"""How much code there is: tokens by room.

A token is a name, an operator, a number or a string. Docstrings, comments and layout count nothing, so neither density
nor spacing changes the figure.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
#: Single files that belong to a room.
ROOM_OF_FILE = {"_doctor.py": "command line", "__main__.py": "command line", "presets.py": "rules"}


def _docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if isinstance(statement.value.value, str):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def tokens(source: str) -> int:
    """The tokens of a file's text."""
    documented = _docstring_lines(source)
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in COUNTED and token.start[0] not in documented:
            count += 1
    return count


def room(path: Path) -> str:
    """The room of a file of the package, given relative to it."""
    if len(path.parts) > 1:
        return path.parts[0]
    return ROOM_OF_FILE.get(path.name, "files beside")


def tokens_by_room(package: Path) -> Counter[str]:
    """The tokens of each room of a package."""
    counts: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        counts[room(file.relative_to(package))] += tokens(file.read_text())
    return counts
