"""Which runs collect the tests of torch's databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from funcamp import _upstream

#: Samples and refusals differ from version to version of torch, and the lists in `known.py` are exact.
VERSION = (2, 13)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The names of the tests are those of torch's operations, and importing these takes seconds: not for a run that
    # leaves these tests out.
    leaves_out = "not compiled" in config.option.markexpr
    return True if leaves_out or VERSION != _upstream.VERSION else None
