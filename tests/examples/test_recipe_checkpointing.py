"""Activation checkpointing: its blocks are computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcamp
from tests.recipes import example
from tests.support.operations import Operations
from tests.support.steps import eager_and_traced

RECIPE = example("checkpointing")
CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=5)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.compiled]


def step_for(model: nn.Module, **options: Any) -> Any:
    loss_fn = funcamp.module_loss(model, nn.functional.mse_loss)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.02, momentum=0.9)
    return funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16", **options)


def batch_of(index: int) -> Any:
    return RECIPE.batch(index, "cpu")


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
