"""The mask of dropout is drawn before a compiled step reads it, whatever the layers around it are fused to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.steps import assert_as_eager

X, Y = torch.randn(8, 6), torch.randn(8, 1)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
    ),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1)
    ),
}


@pytest.mark.inductor
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_with_dropout_is_that_of_eager_mode(name: str, policy: str | None) -> None:
    torch.manual_seed(0)
    sgd = stateless(torch.optim.SGD, lr=0.01)
    step = make_train_step(module_loss(MODELS[name](), F.mse_loss), sgd, policy=policy)
    assert_as_eager(step, jit(step, exact=True), step.init(), [(X, Y)] * 3, 1e-5 if policy is None else 1e-2)
