"""`python -m funcamp doctor` tells what works, and by its exit status whether anything failed."""

from __future__ import annotations

import json

import pytest
import torch

from funcamp import __main__, _doctor

CHECKS = ("_machine", "_compiler", "_verified", "_donation", "_capture", "_parity", "_host_reads", "_launches")


@pytest.mark.inductor
def test_every_check_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--device=cpu", "--seconds=0", "--json"]) == 0
    findings = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(findings) == 11
    assert findings["capture and replay"]["status"] == "not here"
    assert {row["status"] for name, row in findings.items() if name != "capture and replay"} == {"ok"}
    assert "300 steps" in findings["parity with GradScaler"]["detail"]
    assert "eager step: equal" in findings["verify"]["detail"]


def test_a_check_that_fails_stops_no_other_and_shows_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CHECKS:
        monkeypatch.setattr(_doctor, name, lambda device: "fine")
    monkeypatch.setattr(_doctor, "_timing", lambda device, seconds: "fast")
    assert __main__.main(["doctor"]) == 0

    def broken(device: str) -> str:
        raise ValueError("scale at step 3: 2.0 instead of 4.0\nmore")

    monkeypatch.setattr(_doctor, "_parity", broken)
    capsys.readouterr()
    assert __main__.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "parity with GradScaler  failed    ValueError: scale at step 3: 2.0 instead of 4.0\n" in out
    assert out.count(" ok ") == 10


def test_parity_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_STEPS", 30)
    _doctor._parity("cpu")
    monkeypatch.setattr(_doctor, "_CONFIG", _doctor._CONFIG.__class__(2.0**24, growth_factor=2.0, backoff_factor=0.25))
    with pytest.raises(AssertionError, match="scale at step 1"):
        _doctor._parity("cpu")


def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        __main__.main(["doctor", "--device=cuda"])
    assert "--device cuda needs a GPU" in capsys.readouterr().err
