"""The demo: it learns, a run that resumes bit for bit, and one-line errors."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import funcamp
from tests.support.helpers import assert_same
from tests.support.programs import import_example

pytestmark = pytest.mark.slow

demo = import_example("train_gpt")

TINY = ["--width=16", "--layers=1", "--heads=2", "--context=16", "--batch=2", "--eval-every=4", "--total=12"]


def load(folder: Path) -> Any:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_run_lowers_the_held_out_loss_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = demo.main([*TINY, "--steps=40", "--total=40", f"--out={tmp_path}", "--lr=0.01"])
    assert numbers["held_out_last"] < numbers["held_out_first"] - 0.3
    assert numbers["skipped"] > 3
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))
    out = capsys.readouterr().out
    assert "sample" in out
    assert f"skipped {numbers['skipped']}" in out


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["--no-compile", "--compile"])
def test_interrupted_run_is_saved_and_resumed_bit_for_bit(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(funcamp, "jit", functools.partial(funcamp.jit, backend="eager"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    demo.main([*TINY, how, "--steps=8", f"--out={whole}"])
    show = demo.Progress.show

    def interrupting(self: Any, history: Any) -> None:
        show(self, history)
        if len(history["loss"]) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo.Progress, "show", interrupting)
    assert demo.main([*TINY, how, "--steps=8", f"--out={parts}"])["steps"] == 3
    assert demo.main([*TINY, how, "--steps=5", f"--out={parts}", "--resume", "--total=999"])["steps"] == 8
    assert_same(load(parts), load(whole))
