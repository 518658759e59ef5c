"""A long first call says what it is doing, once, where the user looks, and nothing where that is asked."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from funcamp._jit import progress


class Stream(io.StringIO):
    """Where a test reads, and waits for, what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.spoken = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.spoken.set()
        return count


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)


def stderr(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def compiled(stream: Stream, *batches: Tensor, fails: bool = False) -> str:
    """What a jitted step says whose trace goes on until something is said."""

    spoken = stream.spoken  # of a stream that it holds `jit` would not know whether a run has changed it

    def take(state: Tensor, batch: Tensor) -> Any:
        assert spoken.wait(60)
        spoken.clear()
        if fails:
            raise ValueError("mine")
        return state + batch.sum(), {}

    run, state = jit(take, backend="eager"), torch.zeros(())
    for batch in batches:
        state, _ = run(state, batch)
    return stream.getvalue()


def test_it_is_two_lines_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stderr(monkeypatch)
    lines = compiled(stream, torch.ones(3, 2), torch.ones(2)).splitlines()
    assert lines[0] == "funcamp.jit: preparing take for a batch of float32[3, 2]; once for each batch signature"
    assert re.fullmatch(r"funcamp.jit: done after \d+ s: take for a batch of float32\[3, 2\]", lines[1])
    assert "float32[2]; batch changed from a torch.float32 tensor of shape (3, 2) on cpu to a" in lines[2]
    with pytest.raises(ValueError, match="mine"):
        compiled(stream, torch.ones(3), fails=True)
    assert re.search(r"jit: failed after \d+ s: take for a batch", stream.getvalue())


def test_a_logger_that_is_enabled_gets_it_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, stream = stderr(monkeypatch), Stream()
    monkeypatch.setattr(caplog.handler, "stream", stream)
    with caplog.at_level(logging.INFO, "funcamp"):
        lines = compiled(stream, torch.ones(3)).splitlines()
    assert ["jit: preparing take" in lines[0], "jit: done after" in lines[1], len(lines)] == [True, True, 2]
    assert other.getvalue() == ""


def test_nothing_is_said_if_that_is_asked_or_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream, other = stderr(monkeypatch), Stream()
    stream.spoken.set()
    other.spoken.set()
    with caplog.at_level(logging.WARNING, "funcamp"):
        assert compiled(stream, torch.ones(3)) == ""
    stream.close()
    assert compiled(other, torch.ones(3)) == ""


@pytest.mark.inductor
def test_torch_logs_nothing_of_products_and_of_calls_through_python(caplog: pytest.LogCaptureFixture) -> None:
    def step(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        root: Tensor = torch.linalg.cholesky(weight @ weight.t() + torch.eye(3))
        return weight + 1, torch.addmm(x[0], x, root.view(3, 3))

    jit(step)(torch.ones(3, 3), torch.ones(4, 3))
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == []
