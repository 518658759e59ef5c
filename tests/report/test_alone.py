"""The report knows torch, and the counts of `funcamp.numerics`: nothing of the core."""

from __future__ import annotations

import ast
from pathlib import Path

import funcamp

FOLDER = Path(funcamp.__file__).parent / "report"
#: What its files may import of this package.
ALLOWED = ("funcamp.report", "funcamp.numerics")


def imports(file: Path) -> set[str]:
    """The modules that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, file
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_report_imports_nothing_of_the_core() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert files
    own = {(file.name, name) for file in files for name in imports(file) if name.split(".")[0] == "funcamp"}
    assert {(file, name) for file, name in own if not name.startswith(ALLOWED)} == set()
