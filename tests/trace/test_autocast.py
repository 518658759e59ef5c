"""autocast in a jitted step: the casts, and so the losses, overflows and skips, of torch's loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, make_train_step, module_loss, stateless
from tests.support.steps import assert_as_eager, traced

SGD = stateless(torch.optim.SGD, lr=0.01)
WIDTH = 8
MICRO_BATCHES = 3


class UsedTwice(nn.Module):
    """A matrix and a bias that only autocast casts, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.bias, x, self.matrix)
        return torch.addmm(self.bias, self.norm(hidden).tanh(), self.matrix)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def windows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES, 4, WIDTH)
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(6)]
    pairs[3][0][1] *= 1e5  # beyond float16
    return pairs


class Inverse(nn.Module):
    """Inside of pinverse autocast is off, and inside of pinv it is on."""

    def __init__(self, invert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH) / 20)
        self.invert = invert

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.invert(self.matrix)


@pytest.mark.parametrize("kind", [UsedTwice, lambda: Inverse(torch.pinverse)])
def test_a_trace_casts_where_the_eager_step_does(kind: Callable[[], nn.Module]) -> None:
    config = ScalerConfig(init_scale=2.0**12, growth_interval=2)
    loss_fn = module_loss(kind(), loss_of)
    step = make_train_step(loss_fn, SGD, config, policy="float16", accumulate=MICRO_BATCHES)
    rows = assert_as_eager(step, traced(step), step.init(), windows())
    assert {row.found_inf.item() for row in rows} == {0.0, 1.0}
