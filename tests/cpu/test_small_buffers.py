"""Small buffers in one block: no number changes, and metrics are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from funcamp import jit, make_train_step, module_loss
from tests.support.generated import code_of
from tests.support.helpers import assert_same
from tests.support.steps import SGD


def train(**options: Any) -> tuple[Any, list[Any], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    step = make_train_step(module_loss(model, nn.functional.mse_loss), SGD, max_norm=1.0)
    run, state, rows = jit(step, **options), step.init(), []
    code = code_of(run, step.init(), (torch.randn(6, 8), torch.randn(6, 4)))
    for _ in range(4):
        state, metrics = run(state, (torch.randn(6, 8), torch.randn(6, 4)))
        rows.append((metrics, metrics.loss.clone()))
    return state, rows, code


@pytest.mark.inductor
def test_no_number_changes_and_metrics_are_kept() -> None:
    state, rows, code = train()
    *without, code_without = train(without=["small_buffers"])
    assert "Part buf" in code
    assert "Part buf" not in code_without
    assert_same([state, rows], without)
    for metrics, loss in rows:  # what a caller has is not in a block that later calls write
        assert_same(metrics.loss, loss)
