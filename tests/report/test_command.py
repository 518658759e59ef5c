"""`python -m funcamp report`: what it prints of a loop's mistakes, its JSON and its exit status."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from funcamp.__main__ import main
from funcamp.report.audit import Auditor
from tests.report.scripts import LOOPS, RIGHT_LOOPS, watch

CLIPS = LOOPS["clip-before-unscale"]
READS = LOOPS["scale-read-each-step"]


def reported(path: Path, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> set[tuple[str, int]]:
    """The findings of the command for a script: their names and lines. Torch may raise for a mistake."""
    capsys.readouterr()
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        main(["report", "--json", "--out", str(folder), str(path), "--", *arguments])
    return {(row["name"], row["line"]) for row in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib no picture is drawn, which takes longest."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def findings_of(auditor: Auditor) -> set[tuple[str, int]]:
    return {(finding.rule.name, finding.line.number) for finding in auditor.findings()}


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("name", ["read-before-unscale", "overflow-replaced", "float16-overflow"])
def test_the_command_finds_what_the_auditor_finds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported(LOOPS[name], tmp_path, capsys) == findings_of(watch(LOOPS[name], raises=True))
    assert reported(LOOPS[name], tmp_path, capsys, "--right") == set()


@pytest.mark.usefixtures("no_picture")
@pytest.mark.filterwarnings("ignore:.*reentrant:UserWarning")
@pytest.mark.parametrize("name", ["typical", "checkpointed", "funcamp_scaler", "gradient_penalty"])
def test_the_command_finds_nothing_in_a_right_loop(name: str, tmp_path: Path) -> None:
    assert main(["report", "--strict", "--out", str(tmp_path), str(RIGHT_LOOPS[name])]) == 0


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
    assert main(["report", "--out", str(tmp_path), str(CLIPS)]) == 0
    printed = capsys.readouterr().out
    assert "The loop: 1 mistake in 6 backward passes." in printed
    assert "clip-before-unscale" in printed
    assert "6 times: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in printed
    assert "change: scaler.unscale_(optimizer)  # before the clipping" in printed
    assert "effect: norm and values are times the scale" in (tmp_path / "report.txt").read_text()


def test_strict_fails_on_a_mistake_and_not_on_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["report", "--strict", "--out", str(tmp_path)]
    assert main([*options, str(CLIPS)]) == 1
    assert main([*options, str(CLIPS), "--", "--right"]) == 0
    assert main([*options, str(READS)]) == 0
    assert "0 mistakes and 1 note in 6 backward passes" in capsys.readouterr().out


def test_strict_fails_although_the_script_exits_with_success(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{CLIPS.read_text()}\nsys.exit(0 if right or 'zero' in sys.argv else 3)\n")
    options = ["report", "--strict", "--out", str(tmp_path), str(script), "--"]
    assert main([*options, "zero"]) == 1
    with pytest.raises(SystemExit, match="0"):
        main([*options, "--right"])
    with pytest.raises(SystemExit, match="3"):
        main(options)


def test_json_is_all_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"print('mine')\n{CLIPS.read_text()}")
    assert main(["report", "--json", "--out", str(tmp_path), str(script)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "mine" in captured.err
    assert found["passes"] == 6
    assert [(row["name"], row["times"], row["note"]) for row in found["findings"]] == [
        ("clip-before-unscale", 6, False)
    ]
    assert found["findings"][0]["file"] == str(script)
    assert any("Loss scale in this run" in sentence for sentence in found["numerics"])


def test_a_module_is_run_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.report.loops.clip_before_unscale"
    assert main(["report", "-m", "--strict", "--out", str(tmp_path), name]) == 1
    assert main(["report", "-m", "--strict", "--out", str(tmp_path), name, "--", "--right"]) == 0
    assert "clip-before-unscale" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module"])
def test_a_module_that_does_not_exist_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "-m", "--out", str(tmp_path), name])
    assert f"target must name a module; there is no {name}" in capsys.readouterr().err


def test_a_mistake_is_printed_although_torch_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        main(["report", "--out", str(tmp_path), str(LOOPS["update-twice"])])
    assert "update-twice" in capsys.readouterr().out


@pytest.mark.processes
def test_the_traceback_has_no_line_of_the_auditor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "funcamp", "report", "--out", str(tmp_path), str(LOOPS["update-twice"])]
    ran = subprocess.run(command, capture_output=True, text=True)
    files = re.findall(r'File "(.*)", line', ran.stderr)
    assert ran.returncode == 1
    assert files[0] == str(LOOPS["update-twice"])
    assert files[1].endswith("grad_scaler.py")
    assert len(files) == 2


def test_the_script_ends_before_the_pass_that_is_not_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    assert main(["report", "--out", str(tmp_path), "--watch", "2", str(script)]) == 0
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
