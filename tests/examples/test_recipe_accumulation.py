"""What examples/recipes/accumulation.py says of its windows: scanned or not, one program a size, skipped as a whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcamp
from tests.recipes import example, trace_of
from tests.recipes.accumulation import oracle
from tests.support.helpers import assert_same, one_thread

STEPS = 40
COMPILED = functools.partial(funcamp.jit, backend="eager")


@pytest.mark.compiled
def test_compiled_is_the_torch_loop_in_one_program_for_each_window_size() -> None:
    recipe, runs = example("accumulation"), []

    def wrap(step: Any) -> Any:
        runs.append(COMPILED(step))
        return runs[-1]

    with one_thread():
        params, history = recipe.train(STEPS, wrap)
        expected_params, expected_trace = oracle(recipe, STEPS, "cpu")
    assert {len(recipe.batch(index, "cpu")[0]) for index in range(STEPS)} == {4, 2}
    assert runs[0].programs == 2
    assert trace_of(history) == expected_trace
    assert_same(params, expected_params)


@pytest.mark.parametrize("bad", range(4))
def test_overflow_of_one_micro_batch_skips_its_window(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example("accumulation")
    whole = recipe.batch

    def batch(index: int, device: str) -> Any:
        x, y = whole(index, device)
        if index == STEPS - 1:
            x[bad] *= 1e6  # beyond float16
        return x, y

    with one_thread():
        before, _ = recipe.train(STEPS - 1, lambda step: step)
        monkeypatch.setattr(recipe, "batch", batch)
        after, history = recipe.train(STEPS, lambda step: step)
    assert len(whole(STEPS - 1, "cpu")[0]) == 4
    assert [metrics.found_inf.item() for metrics in history[-2:]] == [0.0, 1.0]
    assert torch.stack([metrics.found_inf for metrics in history]).sum() < STEPS / 2
    assert_same(after, before)
