"""The example programs, which find one another in the folder that they are in."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tests.support.launch import ROOT


def add_folder(name: str) -> None:
    """Let Python find the modules of a folder of the repository, before any other of their names."""
    folder = str(ROOT / name)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def import_example(name: str, folder: str = "examples") -> Any:
    """Import an example by the name of its file."""
    add_folder(folder)
    return importlib.import_module(name)
