"""The public names, and how a page's code is run."""

from __future__ import annotations

import re
from pathlib import Path

import funcamp
from docs import hooks
from funcamp import distributed, float8, numerics, report, rules

PUBLIC = [*funcamp.__all__]
PUBLIC += [
    f"{module.__name__[8:]}.{name}"
    for module in (numerics, report, distributed, float8, rules)
    for name in module.__all__
]
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    """Return the Python of a page, block by block, without that of files, which their own tests run."""
    text = hooks.emptied(page.read_text())
    return [code for language, code in CODE.findall(text) if language == "python"]


def assert_python_runs(page: Path) -> None:
    """Run the Python of a page in one namespace."""
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)
