"""No false alarm in the loops of other libraries, nor in this project's own examples."""

from __future__ import annotations

import functools
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

from funcamp.report.audit import Auditor
from tests.support.trainers import NUMBERS, STEPS, TRAINERS, imported, make_trainer, record

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["accelerate_loop", "lightning_mixed", "recipes/before_after", "recipes/sparse_embedding"]

WATCHED = TRAINERS | {"trainer, saving": functools.partial(make_trainer, save_strategy="steps", save_steps=10)}


def scaled_steps(auditor: Auditor) -> int:
    """How many steps the auditor has seen scalers take."""
    return sum(optimizer.steps for optimizer in auditor.loop.optimizers.values() if optimizer.scaler is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_has_no_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
) -> None:
    script = EXAMPLES / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.syspath_prepend(str(script.parent))
    auditor = Auditor(100)
    with warnings.catch_warnings(), auditor.watching():
        warnings.simplefilter("ignore")
        runpy.run_path(str(script), run_name="__main__")
    assert auditor.passes == 100
    assert auditor.findings() == []


@pytest.mark.models
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore:`[a-z_]*gradient_checkpointing[a-z_]*` is deprecated:FutureWarning")
@pytest.mark.parametrize("client", WATCHED)
def test_a_trainer_has_no_finding(client: str, tmp_path: Path) -> None:
    auditor = Auditor()
    with auditor.watching():
        trainer = WATCHED[client](tmp_path)
        record(trainer, functools.partial(torch.amp.GradScaler, "cpu", **NUMBERS))
        trainer.train()
    assert auditor.passes >= STEPS
    assert scaled_steps(auditor) == STEPS
    assert auditor.findings() == []


@pytest.mark.models
@pytest.mark.usefixtures("one_thread")
def test_timms_loop_has_no_finding(tmp_path: Path) -> None:
    example = imported("timm_train")
    auditor = Auditor()
    with auditor.watching():
        example.train(example.TimmScaler("cpu"), tmp_path)
    assert scaled_steps(auditor) > 20
    assert auditor.findings() == []
