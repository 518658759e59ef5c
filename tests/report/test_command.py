"""`python -m funcamp report`: what it prints of a loop's mistakes, and its exit status."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from funcamp.__main__ import main
from funcamp.report.audit import Auditor
from tests.report.scripts import LOOPS, watch

CLIPS = LOOPS["clip-before-unscale"]
PASSES = """
import torch
layer = torch.nn.Linear(4, 4)
for number in range(5):
    try:
        layer(torch.ones(2, 4)).sum().backward()
        print("pass", number)
    except BaseException:
        pass
"""


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


def test_a_mistake_is_printed_with_its_line_effect_and_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(CLIPS) == 0
    printed = capsys.readouterr().out
    assert "The loop: 1 mistake in 6 backward passes." in printed
    assert "clip-before-unscale" in printed
    assert "6 times: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" in printed
    assert "change: scaler.unscale_(optimizer)  # before the clipping" in printed
    assert "effect: norm and values are times the scale" in printed


def test_strict_fails_on_a_mistake_and_not_on_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--strict", CLIPS) == 1
    assert report("--strict", CLIPS, "--", "--right") == 0
    for note in ("scaler-with-bfloat16", "read-before-unscale"):
        assert report("--strict", LOOPS[note]) == 0
        assert "0 mistakes and 1 note in 6 backward passes" in capsys.readouterr().out
    script = tmp_path / "train.py"
    script.write_text(f"{CLIPS.read_text()}\nsys.exit(0 if right or 'zero' in sys.argv else 3)\n")
    assert report("--strict", script, "--", "zero") == 1
    for argument, status in (("--right", "0"), ("other", "3")):
        with pytest.raises(SystemExit, match=status):
            report("--strict", script, argument)


def test_what_follows_the_script_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nprint(sys.argv[1:])\ntorch.ones(1, requires_grad=True).sum().backward()\n")
    for separator in ([], ["--"]):
        assert report("--watch", 3, script, *separator, "--lr", "3", "--strict", "data", "-m", "--", "-h") == 0
        assert "['--lr', '3', '--strict', 'data', '-m', '--', '-h']\n" in capsys.readouterr().out


def test_a_module_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.report.loops.clip_before_unscale"
    assert report("-m", "--strict", name) == 1
    assert report("-m", "--strict", name, "--right") == 0
    assert "clip-before-unscale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is none at nowhere.py"),
        (["--flag", "x.py"], "unrecognized arguments: --flag"),
        (["-m", "no.such.module"], "target must name a module; there is no no.such.module"),
        (["--watch", "0", "x.py"], "--watch must be 1 or more"),
        ([__file__], "target must run a backward pass; none was seen in"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report(*arguments)
    assert message in capsys.readouterr().err


def test_a_mistake_is_printed_although_torch_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{CLIPS.read_text()}\nscaler.update()\n")
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        report(script)
    assert "The loop: 1 mistake in 6 backward passes." in capsys.readouterr().out
    script.write_text("import torch\nscores = torch.zeros(2, 2).half()\nscores.masked_fill(scores == 0, -1e9)\n")
    with pytest.raises(RuntimeError, match="without overflow"):
        report(script)
    assert "constant-beyond-float16" in capsys.readouterr().out
    script.write_text("import torch\ntorch.ones(1, requires_grad=True).backward()\ntorch.ones(2) @ torch.ones(3)\n")
    with pytest.raises(RuntimeError, match="size"):
        report(script)
    assert "0 mistakes" in capsys.readouterr().out


def test_the_script_ends_before_the_pass_that_is_not_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PASSES)
    assert report("--watch", 2, script) == 0
    printed = capsys.readouterr().out
    assert "pass 1" in printed
    assert "pass 2" not in printed
    assert "in 2 backward passes" in printed


def test_what_a_script_makes_of_the_end_of_the_watch_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PASSES.replace("        pass", "        raise SystemExit(1)"))
    assert report("--watch", 2, script) == 0


def test_nothing_of_torch_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = (torch.amp.GradScaler, torch.optim.Optimizer, torch.nn.utils, torch.autograd, torch, torch.nn.Module)
    before = [dict(vars(owner)) for owner in owners]
    monkeypatch.setattr(sys, "argv", [str(CLIPS)])
    auditor = Auditor(2)
    with auditor.watching():
        from torch.nn.utils import clip_grad_norm_ as imported

        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(lambda gradient: gradient / 2)
        runpy.run_path(str(CLIPS))
    assert [dict(vars(owner)) for owner in owners] == before
    weight.sum().backward()
    assert weight.grad == 0.5
    imported([weight], 1.0)
    assert auditor.passes == 2


def test_a_finding_on_one_of_several_optimizers_names_it() -> None:
    (finding,) = watch(LOOPS["optimizer-not-stepped"]).findings()
    assert re.fullmatch(r"SGD, made at .*parts.py:\d+", finding.detail)
