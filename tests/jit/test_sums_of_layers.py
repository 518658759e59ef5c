"""Sums of layers in 16 bits compile: their biases have one gradient, which is stored for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss
from tests.support.steps import SGD, assert_as_eager


class Sums(nn.Module):
    """A sum of layers of each kind, and of layers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(features, 32) for features in (4, 1, 2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv1d(32, 32, size, padding=size // 2) for size in (1, 3))
        self.time = nn.Linear(1, 32)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.linear[0](x) + self.linear[1](t) + self.linear[2](x[:, :2])
        hidden = self.norms[0](hidden) + self.norms[1](hidden.tanh())
        rows = torch.stack([hidden * number for number in range(8)], -1)
        convolved = self.convolutions[0](rows) + self.convolutions[1](rows) + self.time(t)[:, :, None]
        mean: Tensor = convolved.mean(-1)
        return mean


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_sums_of_layers_are_the_eager_ones(policy: str) -> None:
    step = make_train_step(module_loss(Sums(), nn.functional.mse_loss), SGD, ScalerConfig(2.0**8), policy=policy)
    batch = torch.randn(32, 4), torch.rand(32, 1), torch.randn(32, 32)
    (metrics,) = assert_as_eager(step, jit(step, donate=False), step.init(), [batch], 2e-2)
    assert not metrics.found_inf
