"""`python -m funcamp report`: what it prints of a loop's mistakes, its JSON and its exit status."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from funcamp.__main__ import main
from funcamp.report.audit import Auditor
from tests.report.scripts import LOOPS, watch

CLIPS = LOOPS["clip-before-unscale"]
NOTED = LOOPS["scaler-with-bfloat16"]


PLAIN = """
import torch
layer = torch.nn.Linear(4, 4)
for number in range(5):
    try:
        layer(torch.ones(2, 4)).sum().backward()
        print("pass", number)
    except BaseException:
        pass
"""


def test_a_mistake_is_printed_with_its_line_effect_and_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(CLIPS)]) == 0
    printed = capsys.readouterr().out
    assert "The loop: 1 mistake in 6 backward passes." in printed
    assert "clip-before-unscale" in printed
    assert "6 times: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in printed
    assert "change: scaler.unscale_(optimizer)  # before the clipping" in printed
    assert "effect: norm and values are times the scale" in printed


def test_strict_fails_on_a_mistake_and_not_on_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["report", "--strict"]
    assert main([*options, str(CLIPS)]) == 1
    assert main([*options, str(CLIPS), "--", "--right"]) == 0
    assert main([*options, str(NOTED)]) == 0
    assert "0 mistakes and 1 note in 6 backward passes" in capsys.readouterr().out


def test_strict_fails_although_the_script_exits_with_success(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{CLIPS.read_text()}\nsys.exit(0 if right or 'zero' in sys.argv else 3)\n")
    options = ["report", "--strict", str(script), "--"]
    assert main([*options, "zero"]) == 1
    with pytest.raises(SystemExit, match="0"):
        main([*options, "--right"])
    with pytest.raises(SystemExit, match="3"):
        main(options)


def test_a_module_is_run_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.report.loops.clip_before_unscale"
    assert main(["report", "-m", "--strict", name]) == 1
    assert main(["report", "-m", "--strict", name, "--", "--right"]) == 0
    assert "clip-before-unscale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is none at nowhere.py"),
        (["x.py", "--flag"], "unrecognized arguments: --flag"),
        (["-m", "no.such.module"], "target must name a module; there is no no.such.module"),
        (["--watch", "0", "x.py"], "--watch must be 1 or more"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", *arguments])
    assert message in capsys.readouterr().err


def test_a_script_without_a_backward_pass_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(1)\n")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(script)])
    assert "target must run a backward pass; none was seen" in capsys.readouterr().err


def test_a_mistake_is_printed_although_torch_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        main(["report", str(LOOPS["update-twice"])])
    assert "update-twice" in capsys.readouterr().out


def test_the_script_ends_before_the_pass_that_is_not_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    assert main(["report", "--watch", "2", str(script)]) == 0
    printed = capsys.readouterr().out
    assert "pass 1" in printed
    assert "pass 2" not in printed
    assert "in 2 backward passes" in printed


def test_nothing_of_torch_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    owners = (torch.amp.GradScaler, torch.optim.Optimizer, torch.nn.utils, torch.autograd, torch, torch.nn.Module)
    before = [dict(vars(owner)) for owner in owners]
    monkeypatch.setattr(sys, "argv", [str(CLIPS)])
    with Auditor(2).watching():
        runpy.run_path(str(CLIPS))
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_line_that_only_the_end_shows_is_counted_as_often_as_it_ran() -> None:
    (finding,) = watch(LOOPS["optimizer-not-stepped"]).findings()
    assert finding.times == 6
