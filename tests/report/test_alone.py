"""The report knows torch, and the counts of `funcamp.numerics`: nothing of the core."""

from __future__ import annotations

import re
from pathlib import Path

import funcamp

IMPORTED = re.compile(r"^\s*(?:from|import) (funcamp\S*)", re.MULTILINE)


def test_the_report_imports_nothing_of_the_core() -> None:
    files = (Path(funcamp.__file__).parent / "report").rglob("*.py")
    imported = {name for file in files for name in IMPORTED.findall(file.read_text())}
    assert "funcamp.report.audit" in imported
    assert {name for name in imported if not name.startswith(("funcamp.report", "funcamp.numerics"))} == set()
