"""The scripts that the tests run under the auditor: a loop with each mistake, and right loops of other forms."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from funcamp.report.audit import Auditor

_FOLDER = Path(__file__).parent
#: By the name of the rule, after which "--" and a name may follow.
LOOPS = {path.stem.replace("_", "-"): path for path in sorted((_FOLDER / "loops").glob("[!_]*.py"))}
del LOOPS["parts"]
RIGHT_LOOPS = {path.stem: path for path in sorted((_FOLDER / "right_loops").glob("[!_]*.py"))}


def run(path: Path, *arguments: str) -> dict[str, Any]:
    """Run a script from the same random numbers; return its variables."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        return runpy.run_path(str(path), run_name="__main__")


def watch(path: Path, *arguments: str) -> Auditor:
    """Run a script under the auditor."""
    auditor = Auditor()
    with auditor.watching():
        run(path, *arguments)
    return auditor
