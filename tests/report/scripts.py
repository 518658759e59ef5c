"""The scripts that the tests run under the auditor: a loop with each mistake, and right loops of other forms."""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path

import pytest

from funcamp.report.audit import Auditor

_FOLDER = Path(__file__).parent
#: By the name of the rule.
LOOPS = {path.stem.replace("_", "-"): path for path in sorted((_FOLDER / "loops").glob("[!_]*.py"))}
del LOOPS["parts"]
RIGHT_LOOPS = {path.stem: path for path in sorted((_FOLDER / "right_loops").glob("[!_]*.py"))}


def watch(path: Path, *arguments: str, raises: bool = False) -> Auditor:
    """Run a script under the auditor; raises: torch may raise for its mistake."""
    auditor = Auditor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        allowed = (RuntimeError, ValueError, AssertionError) if raises else ()
        with contextlib.suppress(*allowed), auditor.watching():
            runpy.run_path(str(path), run_name="__main__")
    return auditor


def marked_lines(path: Path) -> set[int]:
    """The numbers of the lines that the auditor must name."""
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
