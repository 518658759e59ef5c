"""Per-sample gradients under one scale: what limits a sample's influence, and what happens to one that overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.recipes import example, values
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import eager, traced

RECIPE = example("per_sample")

pytestmark = pytest.mark.usefixtures("one_thread")


def one_step(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Any], scale: float, wrap: Any = eager
) -> Any:
    """The parameters and the row after one step, without noise, with something done to inputs and targets."""
    make = RECIPE.batch

    def batch(index: int, device: str) -> Any:
        x, y, noise = make(index, device)
        return *change(x, y), noise

    with monkeypatch.context() as patch:
        patch.setattr(RECIPE, "batch", batch)
        patch.setattr(RECIPE, "NOISE", 0.0)
        patch.setattr(RECIPE, "CONFIG", funcamp.ScalerConfig(init_scale=scale))
        params, (row,) = RECIPE.train(1, wrap)
    return params, row


def first_times(factor: float) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, y: (torch.cat([x[:1] * factor, x[1:]]), y)


@pytest.mark.parametrize("scale", [2.0**2, 2.0**8])
def test_one_sample_moves_the_step_by_its_limit_at_most(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    usual, _ = one_step(monkeypatch, first_times(1.0), scale)
    assert_close(one_step(monkeypatch, first_times(1.0), 2.0**10)[0], usual, 2.0**-10)
    limit = 2 * RECIPE.MAX_NORM * RECIPE.LR / 16
    for factor in (-1.0, 100.0, -100.0):
        params, row = one_step(monkeypatch, first_times(factor), scale)
        assert row.found_inf == 0
        moved = torch.cat([(params[name] - usual[name]).flatten() for name in params]).norm()
        assert 0 < moved <= limit * (1 + 1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [eager, traced])
def test_sample_that_overflows_skips_the_step_or_is_dropped(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    start = values(RECIPE.make_model())
    params, row = one_step(monkeypatch, first_times(1e6), 2.0**8, wrap)
    assert row.found_inf == 1
    assert_same(params, start)
    monkeypatch.setattr(RECIPE, "DROP", True)
    params, row = one_step(monkeypatch, first_times(1e6), 2.0**8, wrap)
    assert row.found_inf == 1  # the scale backs off
    rest, _ = one_step(monkeypatch, lambda x, y: (x[1:], y[1:]), 2.0**8)
    assert_close(params, {name: start[name] + (rest[name] - start[name]) * 15 / 16 for name in start}, 1e-6)
