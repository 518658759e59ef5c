"""Every test of passes for a CPU traces or compiles."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:  # those of the complete session
        if folder in item.path.parents:
            item.add_marker("compiled")
