"""The three ways in which a program uses the memory of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from funcamp import jit
from tests.support.stand_in import StandIn


@pytest.fixture(params=["donated", "captured", "undonated"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a state is used; a captured program is in a stand-in for a CUDA graph."""
    if request.param == "captured":
        StandIn().take_place(monkeypatch)
    name: str = request.param
    return name


@pytest.fixture
def compiled(mode: str) -> Callable[..., Any]:
    """`jit` by a compiler that generates no code."""
    return lambda step, **options: jit(step, backend="aot_eager", donate=mode != "undonated", **options)
