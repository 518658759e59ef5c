"""`python -m funcamp doctor` reports what works, and by its exit status whether anything failed."""

from __future__ import annotations

import functools

import pytest
import torch

import funcamp
from funcamp import __main__, _doctor
from funcamp._verify.report import Comparison, Outcome, Verification
from funcamp._verify.rounding import Difference


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor  # one check is for the compiler
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_every_check_passes_here(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(funcamp, "jit", functools.partial(funcamp.jit, backend=backend))
    assert __main__.main(["doctor", "--device=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "eager step: equal" in lines[3]


def test_a_check_that_fails_stops_no_other_and_shows_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_machine", "_compiler", "_verified", "_time_and_syncs"):
        monkeypatch.setattr(_doctor, name, lambda _: "fine")
    assert __main__.main(["doctor"]) == 0

    def broken(_: str) -> str:
        raise ValueError("scale at step 3: 2.0 instead of 4.0\nmore")

    monkeypatch.setattr(_doctor, "_verified", broken)
    capsys.readouterr()
    assert __main__.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "a step beside torch's loop  failed  ValueError: scale at step 3: 2.0 instead of 4.0\n" in out
    assert out.count("  ok ") == 4


def test_a_wrong_step_is_named_with_its_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = Difference(2, "params.w", 1e-2, 1e-5)
    wrong = Comparison("torch's loop - eager step", Outcome.DIFFERENT, difference)
    monkeypatch.setattr(funcamp, "verify", lambda *_, **__: Verification((wrong,), 6, (), None, ()))
    with pytest.raises(AssertionError, match=r"eager step: DIFFERENT from step 2 on: params\.w by 1\.0e-02"):
        _doctor._verified("cpu")


def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        __main__.main(["doctor", "--device=cuda"])
    assert "--device cuda needs a GPU" in capsys.readouterr().err
