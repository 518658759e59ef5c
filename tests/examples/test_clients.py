"""The examples of clients: a Trainer whose step is funcamp's against the Trainer with torch's scaler."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import funcamp
from tests.support import trainers
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import traced
from tests.support.trainers import NUMBERS, STEPS, record

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh_accelerate")]

TORCH = functools.partial(torch.amp.GradScaler, "cpu", **NUMBERS)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "max_grad_norm": 0.1},
    "accumulate": {"gradient_accumulation_steps": 3},
    "no clipping": {"max_grad_norm": 0.0},
}


def step_trainer(folder: Path, **more: Any) -> Any:
    example = trainers.imported("hf_trainer")
    config = funcamp.ScalerConfig(**NUMBERS)
    return trainers.make_trainer(folder, example.StepTrainer, config=config, wrap=traced, **more)


@pytest.mark.parametrize("variant", VARIANTS)
def test_trainer_with_a_step_skips_and_learns_as_with_torchs_scaler(variant: str, tmp_path: Path) -> None:
    expected_trainer = trainers.make_trainer(tmp_path, **VARIANTS[variant])
    expected = record(expected_trainer, TORCH)
    expected_trainer.train()
    trainer = step_trainer(tmp_path, **VARIANTS[variant])
    rows = record(trainer)
    trainer.train()
    assert {row["skipped"] for row in rows} == {True, False}
    for name in ("skipped", "lr", "scaler"):
        assert [row[name] for row in rows] == [row[name] for row in expected]
    # The rate is a float32 tensor, and the norm's sums have another order.
    assert_close([row["params"] for row in rows], [row["params"] for row in expected], 1e-3)
    logs = [one.state.log_history for one in (trainer, expected_trainer)]
    for name in ("loss", "grad_norm"):
        actual, wanted = (torch.tensor([row[name] for row in log if name in row]) for log in logs)
        assert torch.equal(actual.isfinite(), wanted.isfinite())
        assert_close(actual[actual.isfinite()], wanted[wanted.isfinite()], 1e-3)
    evaluated = [one.evaluate()["eval_loss"] for one in (trainer, expected_trainer)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-3)


OTHER_LOSSES: dict[str, dict[str, Any]] = {
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {"compute_loss_func": len},
    "compute_loss": {},
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_another_loss_than_the_models_is_refused_by_name(name: str, tmp_path: Path) -> None:
    trainer_class = trainers.imported("hf_trainer").StepTrainer
    own = type("Own", (trainer_class,), {"compute_loss": lambda *_, **__: None})
    with pytest.raises(ValueError, match=f"StepTrainer: {name} must be Trainer's default"):
        trainers.make_trainer(tmp_path, own if name == "compute_loss" else trainer_class, **OTHER_LOSSES[name])


@pytest.mark.thorough
def test_trainer_with_a_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    half = STEPS // 2
    saving = {"save_strategy": "steps", "save_steps": half, "gradient_accumulation_steps": 2}
    whole = step_trainer(tmp_path / "whole", **saving)
    expected = record(whole)
    whole.train()
    after = step_trainer(tmp_path / "after", **saving)
    actual = record(after)
    after.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{half}"))
    assert_same(actual, expected[half:])
    assert_same(after.step.state_dict(after.train_state), whole.step.state_dict(whole.train_state))


@pytest.mark.thorough
def test_evaluation_and_the_best_checkpoint_see_the_trained_values(tmp_path: Path) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    losses, rows = [], []
    for make, scaler in ((trainers.make_trainer, TORCH), (step_trainer, None)):
        trainer = make(tmp_path, **often, load_best_model_at_end=True)
        rows.append(record(trainer, scaler))
        trainer.train()
        losses.append([row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row])
    assert_close([row["params"] for row in rows[1]], [row["params"] for row in rows[0]], 1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert trainer.evaluate()["eval_loss"] == min(losses[1]) < losses[1][0]


@pytest.mark.parametrize("step", [False, True], ids=["scaler", "step"])
def test_trainer_example_learns(step: bool, tmp_path: Path) -> None:
    assert trainers.imported("hf_trainer").main(step=step, folder=str(tmp_path), wrap=traced) < 3.2
