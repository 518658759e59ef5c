"""The two loops of examples/recipes/before_after.py: torch's own, and the same one with funcamp, step by step."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import funcamp
from tests.recipes import example, trace_of
from tests.recipes.before_after import TOLERANCE, oracle
from tests.support.helpers import assert_close, one_thread

STEPS = 40
EAGER = pytest.param(lambda step, **_: step, id="eager")
COMPILED = pytest.param(functools.partial(funcamp.jit, backend="eager"), id="compiled")


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
def test_both_loops_have_the_same_scales_skips_losses_and_parameters(wrap: Any) -> None:
    recipe = example("before_after")
    with one_thread():
        expected, trace = oracle(recipe, STEPS, "cpu")
        _, old = recipe.before(STEPS)
        params, new = recipe.train(STEPS, wrap)
    assert trace_of(new) == trace
    assert sum(skipped for _, skipped in trace) >= 10
    assert_close(params, expected, TOLERANCE)
    assert_close(torch.stack([m.loss for m in new]), torch.tensor([row[0] for row in old]), TOLERANCE)
    clipped = [m.grad_norm.item() > 2.0 for m in new if m.found_inf == 0]
    assert min(clipped.count(True), clipped.count(False)) >= 3


def test_before_knows_nothing_of_funcamp() -> None:
    assert "funcamp" not in inspect.getsource(example("before_after").before)
