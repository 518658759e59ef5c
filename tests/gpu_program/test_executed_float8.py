"""The GPU's program of a step in float8, executed, against the step run eagerly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import float8, stateless
from tests.gpu_program.compare import assert_follows_eager
from tests.gpu_program.steps import step_of

pytestmark = pytest.mark.inductor  # for the C++ compiler


def test_layers_in_float8_follow_the_eager_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
    float8.convert(model)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        large = 2.0**20 if number % 3 == 2 else 1.0  # its gradients overflow at this scale
        return torch.randn(16, 16, generator=draw), torch.randn(16, 16, generator=draw) * large

    # Triton 3.7's interpreter loses the carry when it rounds up to a power of two: 1.95 becomes 1 instead of 2. AdamW
    # would make whole steps of that.
    sgd = stateless(torch.optim.SGD, lr=0.1)
    assert_follows_eager(step_of(model, F.mse_loss, sgd, "bfloat16", 2.0**120, max_norm=1.0), batch, 3e-2, 6)
