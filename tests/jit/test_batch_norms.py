"""A compiled batch norm keeps the statistics of a 16-bit batch as exactly as torch's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x))
        return out


@pytest.mark.inductor
def test_gradient_before_a_batch_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = 3 * torch.randn(2, 8, generator=generator), torch.randn(2, 16, generator=generator)

    def gradient(wrap: Any) -> Tensor:
        model, sgd = Normalized(), stateless(torch.optim.SGD, lr=1.0)
        step = make_train_step(module_loss(model, mse_loss), sgd, ScalerConfig(2.0**8), policy="bfloat16")
        state, _ = wrap(step)(step.init(), batch)
        moved: Tensor = model.first.weight.detach() - state.params["first.weight"]
        return moved

    expected = gradient(lambda step: step)
    assert torch.linalg.vector_norm(gradient(jit) - expected) < 1e-4 * torch.linalg.vector_norm(expected)
