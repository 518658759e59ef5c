"""What examples/recipes/layers.py says of buffers, of tied weights and of dropout's numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcamp
from tests.recipes import example, trace_of
from tests.recipes.layers import oracle
from tests.support.helpers import assert_close, assert_same, difference, one_thread

EAGER = pytest.param(lambda step, **_: step, id="eager")
COMPILED = pytest.param(functools.partial(funcamp.jit, backend="eager"), id="compiled")
SKIPPED, LATER = 5, 21  # the first steps are all skipped; so is a later one


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
def test_buffers_of_a_skipped_step_go_back_by_default(wrap: Any) -> None:
    recipe = example("layers")
    with one_thread():
        after, history = recipe.train(SKIPPED, wrap, keep_buffers=False)
        kept, _ = recipe.train(SKIPPED, wrap)
    assert [metrics.found_inf.item() for metrics in history] == [1.0] * SKIPPED
    start = {name: value.clone() for name, value in recipe.make_model().named_buffers()}
    assert_same(after["buffers"], start)
    assert kept["buffers"]["3.num_batches_tracked"] == SKIPPED
    assert kept["buffers"]["3.running_mean"].ne(0).all()
    assert_same(after["params"], kept["params"])


def test_buffers_count_the_applied_steps_alone() -> None:
    recipe = example("layers")
    with one_thread():
        before, _ = recipe.train(LATER, lambda step: step, keep_buffers=False)
        after, history = recipe.train(LATER + 1, lambda step: step, keep_buffers=False)
    assert history[-1].found_inf == 1.0
    assert_same(after, before)
    assert after["buffers"]["3.num_batches_tracked"] == history[-1].applied


def test_tied_weight_is_one_parameter() -> None:
    recipe = example("layers")
    params, _ = recipe.train(1, lambda step: step)
    tied = dict(recipe.make_model().named_parameters(remove_duplicate=False))
    assert set(tied) - set(params["params"]) == {"7.weight"}


@pytest.mark.thorough
@pytest.mark.inductor
def test_exact_draws_what_the_torch_loop_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example("layers")
    with one_thread():
        params, history = recipe.train(20, functools.partial(funcamp.jit, exact=True))
        expected, trace = oracle(recipe, 20, "cpu")
        seeded = torch.manual_seed
        monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded(2 * seed))  # leaves the model's 0
        other, _ = oracle(recipe, 20, "cpu")
    assert trace_of(history) == trace
    assert_close(params, expected, 2.0**-9)
    assert difference(other, expected) > 2.0**-6
