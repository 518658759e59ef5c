"""The public names, and how a page's code is run."""

from __future__ import annotations

import re
from pathlib import Path

import funcamp
from funcamp import distributed, float8, numerics

PUBLIC = [*funcamp.__all__]
PUBLIC += [f"{module.__name__[8:]}.{name}" for module in (numerics, distributed, float8) for name in module.__all__]
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    """Return the Python of a page, block by block."""
    return [code for language, code in CODE.findall(page.read_text()) if language == "python"]


def run_python(page: Path) -> None:
    """Run the Python of a page in one namespace."""
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)
