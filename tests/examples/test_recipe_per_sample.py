"""Per-sample gradients under one scale: what happens to a sample that overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.recipes import example, values
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import eager, eager_and_traced

RECIPE = example("per_sample")

pytestmark = pytest.mark.usefixtures("one_thread")


def one_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Any], wrap: Any = eager) -> Any:
    """The parameters and the row after one step, without noise, with something done to inputs and targets."""
    make = RECIPE.batch

    def batch(index: int, device: str) -> Any:
        x, y, noise = make(index, device)
        return *change(x, y), noise

    with monkeypatch.context() as patch:
        patch.setattr(RECIPE, "batch", batch)
        patch.setattr(RECIPE, "NOISE", 0.0)
        patch.setattr(RECIPE, "CONFIG", funcamp.ScalerConfig(init_scale=2.0**8))
        params, (row,) = RECIPE.train(1, wrap)
    return params, row


def first_overflows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x[:1] * 1e6, x[1:]]), y


@pytest.mark.compiled
@eager_and_traced
def test_sample_that_overflows_skips_the_step_or_is_dropped(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    start = values(RECIPE.make_model())
    params, row = one_step(monkeypatch, first_overflows, wrap)
    assert row.found_inf == 1
    assert_same(params, start)
    monkeypatch.setattr(RECIPE, "DROP", True)
    params, row = one_step(monkeypatch, first_overflows, wrap)
    assert row.found_inf == 1  # the scale backs off
    rest, _ = one_step(monkeypatch, lambda x, y: (x[1:], y[1:]))
    assert_close(params, {name: start[name] + (rest[name] - start[name]) * 15 / 16 for name in start}, 1e-6)
