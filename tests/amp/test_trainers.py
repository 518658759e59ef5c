"""Transformers' Trainer and TRL's with `GradScaler` in Accelerate's slot: what they do with torch's, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.float16_run import SCALERS, assert_moves
from tests.support.helpers import assert_same
from tests.support.trainers import NUMBERS, STEPS, TRAINERS, record

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.models,
    # TRL's own use of names that transformers deprecates.
    pytest.mark.filterwarnings("ignore:`[a-z_]*gradient_checkpointing[a-z_]*` is deprecated:FutureWarning"),
]

TORCH, FUNCAMP = SCALERS["torch"], SCALERS["default"]


@pytest.mark.parametrize("client", TRAINERS)
def test_run_equals_the_one_with_torchs_scaler(client: str, tmp_path: Path) -> None:
    rows = []
    for make in (TORCH, FUNCAMP):
        trainer = TRAINERS[client](tmp_path)
        rows.append(record(trainer, functools.partial(make, **NUMBERS)))
        trainer.train()
    expected, actual = rows
    assert_moves([row["scaler"]["scale"] for row in expected])
    assert len(actual) == STEPS
    assert_same(actual, expected)
    if client != "trainer, fused":  # which Accelerate takes for applied, with either scaler
        assert {row["skipped"] for row in expected} == {True, False}


@pytest.mark.parametrize("client", TRAINERS)
@pytest.mark.parametrize(("first", "second"), [(TORCH, FUNCAMP), (FUNCAMP, TORCH)], ids=["to funcamp", "to torch"])
def test_loaded_checkpoint_continues_as_the_uninterrupted_run(
    client: str, first: Any, second: Any, tmp_path: Path
) -> None:
    half = STEPS // 2
    saving = {"save_strategy": "steps", "save_steps": half}
    whole = TRAINERS[client](tmp_path / "whole", **saving)
    expected = record(whole, functools.partial(first, **NUMBERS))
    whole.train()
    after = TRAINERS[client](tmp_path / "after", **saving)
    actual = record(after, second)  # the file's numbers count, not the constructor's
    after.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{half}"))
    assert_same(actual, expected[half:])
    assert_same(after.optimizer.state_dict(), whole.optimizer.state_dict())
