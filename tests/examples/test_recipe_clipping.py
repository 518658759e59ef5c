"""What examples/recipes/clipping.py does beside its main form: clips by value, and diverges where nothing clips."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import funcamp
from tests.recipes import example, trace_of
from tests.recipes.clipping import clipped
from tests.support.helpers import assert_same, one_thread

STEPS = 40
MAX_VALUE = 0.1
EAGER = pytest.param(lambda step, **_: step, id="eager")
COMPILED = pytest.param(functools.partial(funcamp.jit, backend="eager"), id="compiled")


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [EAGER, COMPILED])
def test_by_value_is_the_torch_loop_bit_for_bit(wrap: Any) -> None:
    recipe = example("clipping")
    bites = []

    def clip(params: Any) -> None:
        params = list(params)
        largest = max(float(p.grad.abs().max()) for p in params)
        bites.append(MAX_VALUE < largest < float("inf"))
        nn.utils.clip_grad_value_(params, MAX_VALUE)

    with one_thread():
        params, history = recipe.train(STEPS, wrap, max_norm=None, max_value=MAX_VALUE)
        expected_params, expected_trace = clipped(recipe, STEPS, "cpu", clip)
    assert sum(bites) > STEPS // 2
    assert trace_of(history) == expected_trace
    assert_same(params, expected_params)


def test_loop_diverges_without_the_clip() -> None:
    recipe = example("clipping")
    with one_thread():
        _, history = recipe.train(100, lambda step: step, max_norm=None)
    losses = torch.stack([metrics.loss for metrics in history[-10:]])
    assert not losses.isfinite().all()
