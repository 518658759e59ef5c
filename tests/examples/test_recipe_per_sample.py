"""Per-sample gradients under one scale: what limits a sample's influence, and what happens to one that overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.recipes import example, oracle, trace_of
from tests.support.helpers import assert_close, assert_same
from tests.support.models import with_two_roundings

RECIPE = example("per_sample")
Wrap = Callable[[Any], Any]
WRAPS = pytest.mark.parametrize(
    "wrap", [lambda step: step, lambda step: funcamp.jit(step, backend="eager")], ids=["eager", "compiled"]
)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_difference_to_the_loop_is_where_vmap_adds_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    params, history = RECIPE.train(40, lambda step: step)
    monkeypatch.setattr(RECIPE, "make_model", with_two_roundings(RECIPE.make_model))
    expected, trace = oracle("per_sample").oracle(RECIPE, 40, "cpu")
    assert trace_of(history) == trace
    assert_same(params, expected)


def one_step(monkeypatch: pytest.MonkeyPatch, wrap: Wrap, change: Callable[[Tensor, Tensor], Any], scale: float) -> Any:
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


def moved(params: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return float(torch.cat([(params[name] - others[name]).flatten() for name in params]).norm())


@pytest.mark.parametrize("scale", [2.0**2, 2.0**8])
def test_one_sample_moves_the_step_by_its_limit_at_most(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    usual, _ = one_step(monkeypatch, lambda step: step, first_times(1.0), scale)
    limit = 2 * RECIPE.MAX_NORM * RECIPE.LR / 16
    for factor in (-1.0, 100.0, -100.0):
        params, row = one_step(monkeypatch, lambda step: step, first_times(factor), scale)
        assert row.found_inf == 0
        assert 0 < moved(params, usual) <= limit * (1 + 1e-5)


def test_limit_does_not_move_with_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    low, _ = one_step(monkeypatch, lambda step: step, first_times(1.0), 2.0**2)
    high, _ = one_step(monkeypatch, lambda step: step, first_times(1.0), 2.0**10)
    assert_close(low, high, 2.0**-10)


@pytest.mark.compiled
@WRAPS
def test_sample_that_overflows_skips_the_step(monkeypatch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    params, row = one_step(monkeypatch, wrap, first_times(1e6), 2.0**8)
    assert row.found_inf == 1
    assert_same(params, {name: value.detach() for name, value in RECIPE.make_model().named_parameters()})


@pytest.mark.compiled
@WRAPS
def test_sample_that_overflows_is_dropped_alone(monkeypatch: pytest.MonkeyPatch, wrap: Wrap) -> None:
    monkeypatch.setattr(RECIPE, "DROP", True)
    params, row = one_step(monkeypatch, wrap, first_times(1e6), 2.0**8)
    assert row.found_inf == 1  # the scale backs off
    rest, row = one_step(monkeypatch, lambda step: step, lambda x, y: (x[1:], y[1:]), 2.0**8)
    assert row.found_inf == 0
    start = {name: value.detach() for name, value in RECIPE.make_model().named_parameters()}
    expected = {name: start[name] + (rest[name] - start[name]) * 15 / 16 for name in start}
    assert all(torch.isfinite(value).all() for value in params.values())
    assert_close(params, expected, 1e-6)


def test_dropping_trains_through_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECIPE, "DROP", True)
    params, history = RECIPE.train(40, lambda step: step)
    assert all(torch.isfinite(value).all() for value in params.values())
    assert sum(row.found_inf.item() for row in history) >= 10
    start = RECIPE.train(0, lambda step: step)[0]
    assert moved(RECIPE.train(1, lambda step: step)[0], start) > 0
