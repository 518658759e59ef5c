"""Without this layer every step runs, and is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from funcamp import _layers, jit, make_train_step, module_loss, stateless
from funcamp._cpu import PASSES
from funcamp._jit import explain
from tests.support.generated import code_of
from tests.support.helpers import assert_close


@pytest.mark.inductor
def test_a_step_is_the_same_without_this_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv1d(4, 4, 5, groups=4)
    model = nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    step = make_train_step(module_loss(model, nn.functional.mse_loss), stateless(torch.optim.AdamW), max_norm=1.0)
    xs, ys = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 3)
    expected = step.init()
    for x, y in zip(xs, ys):
        expected, wanted = step(expected, (x, y))

    assert {one.name for one in PASSES} <= explain.names()
    monkeypatch.setattr(_layers, "_modules_with_passes", [])
    assert not {one.name for one in PASSES} & explain.names()
    run = jit(step, unroll=2)
    assert "CppWrapperCodeCache" not in code_of(run, step.init(), (xs, ys))
    state, metrics = run(step.init(), (xs, ys))
    assert_close(state.params.tree(), expected.params.tree(), 1e-5)
    assert_close(metrics.loss[1], wanted.loss, 1e-5)
