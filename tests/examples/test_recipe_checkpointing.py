"""Activation checkpointing: the step without it, bit for bit; its blocks are computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcamp
from tests.recipes import example
from tests.support.helpers import assert_same, clone, values_of
from tests.support.operations import Operations
from tests.support.steps import eager, eager_and_traced

RECIPE = example("checkpointing")
CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=5)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.compiled]


def step_for(model: nn.Module, **options: Any) -> Any:
    loss_fn = funcamp.module_loss(model, nn.functional.mse_loss)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.02, momentum=0.9)
    return funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16", **options)


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


def trained(model: nn.Module, wrap: Any) -> Any:
    """The state after 20 steps of two micro-batches, and every step's metrics; the draws are those of one seed."""
    step, history = step_for(model, accumulate=2), []
    torch.manual_seed(1)
    state, call = step.init(), wrap(step)
    for index in range(20):
        pairs = zip(batch_of(2 * index), batch_of(2 * index + 1))
        state, metrics = call(state, tuple(map(torch.stack, pairs)))
        history.append(metrics)
    assert 4 <= state.skipped < 20
    return state, history


@eager_and_traced
@pytest.mark.parametrize("middle", [nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.5)], ids=str)
def test_checkpointed_step_is_the_step_without(middle: nn.Module, wrap: Any) -> None:
    ends = []
    for on, how in ((True, wrap), (False, eager)):
        model = Checkpointed(middle, on)
        before = clone(values_of(model))
        ends.append(trained(model, how))
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
