"""Sums of layers in 16 bits compile: their biases have one gradient, which is stored for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import funcamp
from tests.support.steps import assert_as_eager

BATCH, FEATURES, WIDTH, LENGTH = 32, 4, 32, 8


class Sums(nn.Module):
    """A sum of two or three layers of each kind, and of layers of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(features, WIDTH) for features in (FEATURES, 1, 2))
        self.more = nn.ModuleList(nn.Linear(features, WIDTH) for features in (FEATURES, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2) for size in (1, 3))
        self.time = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Shapes (BATCH, FEATURES) and (BATCH, 1) to (BATCH, WIDTH)."""
        two = torch.tanh(self.more[0](x) + self.more[1](t))
        three = self.linear[0](x) + self.linear[1](t) + self.linear[2](x[:, :2])
        hidden = self.norms[0](two) + self.norms[1](three) + self.norms[2](two * three)
        rows = torch.stack([hidden * number for number in range(LENGTH)], -1)
        convolved = self.convolutions[0](rows) + self.convolutions[1](rows) + self.time(t)[:, :, None]
        mean: Tensor = convolved.mean(-1)
        return mean


@pytest.mark.inductor
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_sums_of_layers_are_the_eager_ones(policy: str) -> None:
    torch.manual_seed(0)
    loss = funcamp.module_loss(Sums(), nn.functional.mse_loss)
    step = funcamp.make_train_step(loss, funcamp.stateless(torch.optim.SGD, lr=0.01), policy=policy)
    batch = torch.randn(BATCH, FEATURES), torch.rand(BATCH, 1), torch.randn(BATCH, WIDTH)
    assert_as_eager(step, funcamp.jit(step), step.init(), [batch], 1e-4)
