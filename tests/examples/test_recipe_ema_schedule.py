"""What examples/recipes/ema_schedule.py says of a skipped step: neither the average nor the schedule moves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcamp
from tests.recipes import example
from tests.recipes.ema_schedule import factor
from tests.support.helpers import assert_same, difference, one_thread

LATER = 31  # a skipped step in the middle of the run
EAGER = pytest.param(lambda step, **_: step, id="eager")
COMPILED = pytest.param(functools.partial(funcamp.jit, backend="eager"), id="compiled")


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
def test_skipped_step_moves_neither_parameters_nor_average(wrap: Any) -> None:
    recipe = example("ema_schedule")
    with one_thread():
        before, history = recipe.train(LATER, wrap)
        after, longer = recipe.train(LATER + 1, wrap)
        later, _ = recipe.train(LATER + 2, wrap)
    assert (longer[-1].found_inf, longer[-1].applied) == (1.0, history[-1].applied)
    assert_same(after, before)
    assert difference(later["ema"], after["ema"]) > 1e-5


def test_schedule_is_that_of_the_torch_loop() -> None:
    recipe = example("ema_schedule")
    counts = torch.arange(101)
    expected = torch.tensor([recipe.LR * factor(count) for count in range(101)])
    torch.testing.assert_close(recipe.learning_rate(counts), expected, rtol=1e-5, atol=1e-7)


def test_average_is_of_the_applied_steps_alone() -> None:
    recipe = example("ema_schedule")
    average = {name: value.detach() for name, value in recipe.make_model().named_parameters()}
    params = []

    def noting(step: Any) -> Any:
        def run(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            params.append(state.params.tree())
            return state, metrics

        return run

    with one_thread():
        trees, history = recipe.train(LATER + 1, noting)
    for tree, metrics in zip(params, history):
        if metrics.found_inf == 0:
            average = {name: torch.lerp(value, tree[name], 1 - recipe.DECAY) for name, value in average.items()}
    assert_same(trees["ema"], average)
