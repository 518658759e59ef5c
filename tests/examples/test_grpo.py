"""GRPO in float16: it learns, its rollout and its trainer agree where they are one program, captured equals eager."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcamp
from tests.support.helpers import assert_same, one_thread
from tests.support.programs import import_example
from tests.support.stand_in import StandIn
from tests.support.steps import eager, traced

grpo = import_example("grpo")

#: A scale that overflows at once and, as it grows soon, again and again.
HIGH = funcamp.ScalerConfig(2.0**24, growth_interval=10)


pytestmark = pytest.mark.usefixtures("one_thread")


def history(dtype: str, rollout: str, steps: int, wrap: Any = eager) -> list[dict[str, float]]:
    learner = grpo.make_learner(dtype, 300, HIGH if dtype == "float16" else None)
    run = wrap(grpo.make_step(learner, dtype, rollout))
    return list(grpo.train(run, grpo.first_state(learner, 0), steps, 0))


@functools.cache
def by_engine(dtype: str, steps: int) -> list[dict[str, float]]:
    with one_thread():
        return history(dtype, "engine", steps)


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@pytest.mark.thorough
def test_float16_learns_beside_steps_that_overflow() -> None:
    rows = by_engine("float16", 40)
    assert rows[0]["skipped"] == 2  # both updates
    assert rows[10]["skipped"] < rows[-1]["skipped"] < 20
    assert mean(rows[:5], "reward") < 0.15  # an eighth by chance
    assert mean(rows[-5:], "reward") > 0.35


@pytest.mark.thorough
@pytest.mark.compiled
def test_captured_step_has_the_numbers_of_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn().take_place(monkeypatch)
    rows = history("float16", "engine", 12, traced)
    assert rows == by_engine("float16", 12)


@pytest.mark.parametrize("dtype", grpo.DTYPES)
def test_gap_is_zero_if_rollout_and_trainer_are_one_program(dtype: str) -> None:
    for row in history(dtype, "trainer", 6):
        assert row["gap"] == row["gap_max"] == 0.0


@pytest.mark.slow
def test_gap_of_float16_is_a_fifth_of_bfloat16s_or_less() -> None:
    half, brain = by_engine("float16", 12), by_engine("bfloat16", 12)
    assert 0.0 < mean(half, "gap") < mean(brain, "gap") / 5
    assert max(row["gap_max"] for row in half) < max(row["gap_max"] for row in brain) / 5


def test_cache_changes_no_answer() -> None:
    """In float32 the rollouts differ by the order of their sums."""
    torch.manual_seed(0)
    model = grpo.Policy()
    prompts, noise = grpo.batch_at(0, 0)
    with torch.no_grad():
        answer, old = grpo.by_engine(model, prompts, noise)
        same, new = grpo.by_trainer(model, prompts, noise)
    assert_same(answer, same)
    assert {*answer.flatten().tolist()} == {*range(grpo.DIGITS)}
    torch.testing.assert_close(old, new)


@pytest.mark.thorough
@pytest.mark.compiled
@pytest.mark.inductor
def test_compiled_gap_is_zero_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAYERS": 1, "WIDTH": 16, "HEADS": 2, "LENGTH": 2, "UPDATES": 1}.items():
        monkeypatch.setattr(grpo, name, value)
    for row in history("float16", "trainer", 4, funcamp.jit):
        assert row["gap"] == row["gap_max"] == 0.0
