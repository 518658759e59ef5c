"""Layouts of convolutions on a CPU: channels last in float16, with which torch's own are four times as fast."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.generated import written
from tests.support.helpers import assert_close

pytestmark = pytest.mark.inductor

BATCH = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3])


def step_of(dtype: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ConvTranspose2d(16, 8, 2), nn.Conv2d(8, 8, 2, 2)),
        *(nn.Flatten(2), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(56, 4)),
    )
    config = ScalerConfig(init_scale=2.0**20, growth_interval=3)
    sgd = stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
    loss_fn = module_loss(model, nn.functional.cross_entropy, keep_buffers=True)
    return make_train_step(loss_fn, sgd, config, policy=dtype)


@pytest.mark.parametrize(("dtype", "last"), [("float16", True), ("bfloat16", False)])
def test_layout_is_chosen_by_the_dtype(dtype: str, last: bool) -> None:
    step = step_of(dtype)
    code = written(jit(step), step.init(), BATCH)
    assert bool(re.search(r"576L?, 1L?, 96L?, 16L?", code)) == last  # strides of the first convolution's result


def test_float16_follows_the_eager_step() -> None:
    step = step_of("float16")
    run, state, expected = jit(step, exact=True), step.init(), step.init()
    skips = []
    for _ in range(30):
        state, metrics = run(state, BATCH)
        expected, wanted = step(expected, BATCH)
        assert torch.equal(metrics.found_inf, wanted.found_inf)
        skips.append(bool(metrics.found_inf))
        assert torch.equal(state.scaler.scale, expected.scaler.scale)
    assert 2 <= sum(skips) < 25
    assert_close(state.params.tree(), expected.params.tree(), 2.0**-6)
    assert_close(state.buffers, expected.buffers, 2.0**-6)
    assert all(leaf.is_contiguous() for leaf in state.params.tree().values())
