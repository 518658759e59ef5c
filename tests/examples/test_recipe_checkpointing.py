"""Activation checkpointing: the step without it, bit for bit; its blocks are computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcamp
from tests.recipes import example
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.operations import Operations
from tests.support.steps import eager, eager_and_traced

RECIPE = example("checkpointing")
CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=5)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.compiled]


def step_for(model: nn.Module, **options: Any) -> Any:
    loss_fn = funcamp.module_loss(model, nn.functional.mse_loss)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.02, momentum=0.9)
    return funcamp.make_train_step(loss_fn, sgd, CONFIG, **{"policy": "float16", **options})


def run(step: Any, wrap: Any, batch: Callable[[int], Any], accumulate: int | None = None, steps: int = 20) -> Any:
    """The state after some steps, and every step's metrics; the draws are those of one seed."""
    torch.manual_seed(1)
    state, call, history = step.init(), wrap(step), []
    for index in range(steps):
        parts = [batch(index * (accumulate or 1) + part) for part in range(accumulate or 1)]
        whole = tuple(map(torch.stack, zip(*parts))) if accumulate else parts[0]
        state, metrics = call(state, whole)
        history.append(metrics)
    assert 4 <= history[-1].skipped < 20 or steps < 20
    return state, history


def batch_of(index: int) -> Any:
    return RECIPE.batch(index, "cpu")


class Checkpointed(nn.Module):
    """A body under torch.utils.checkpoint, or not."""

    def __init__(self, middle: nn.Module, on: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.on = nn.Sequential(nn.Linear(8, 16, bias=False), middle, nn.Linear(16, 1)), on

    def forward(self, x: Tensor) -> Any:
        out = checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x)
        return out.float()


@eager_and_traced
@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("middle", [nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.5)], ids=str)
def test_checkpointed_step_is_the_step_without(middle: nn.Module, accumulate: int | None, wrap: Any) -> None:
    ends = []
    for on, how in ((True, wrap), (False, eager)):
        model = Checkpointed(middle, on)
        before = clone(values_of(model))
        ends.append(run(step_for(model, accumulate=accumulate or 1), how, batch_of, accumulate))
        assert_same(values_of(model), before)
    assert_same(*ends)  # the running statistics too: torch's loop updates them twice


@eager_and_traced
def test_checkpointed_blocks_are_computed_twice(wrap: Any) -> None:
    counts = []
    for checkpointed in (False, True):
        step = step_for(RECIPE.make_model(checkpointed))
        call = wrap(step)
        state, _ = call(step.init(), batch_of(0))
        with Operations() as ran:
            call(state, batch_of(1))
        counts.append(ran.counts["aten.gelu"])
    assert counts == [3, 6]


@pytest.mark.thorough
@pytest.mark.inductor
def test_inductor_follows() -> None:
    ends = [run(step_for(RECIPE.make_model(), policy=None), how, batch_of, steps=5) for how in (funcamp.jit, eager)]
    found, expected = (state.params.tree() for state, _ in ends)
    assert_close(found, expected, 1e-5)
