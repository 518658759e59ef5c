"""autocast in a jitted step: the casts, and so the losses, overflows and skips, of torch's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import ScalerConfig, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same
from tests.support.steps import traced

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


class TiedEmbedding(nn.Module):
    """An embedding that is also the matrix of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.abs().mul(10).long() % WIDTH
        hidden = self.norm(self.embedding(tokens)).mean(1)
        logits = hidden @ self.embedding.weight.t()
        output: Tensor = logits @ self.embedding.weight
        return output


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def windows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES, 4, WIDTH)
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(6)]
    pairs[3][0][1] *= 1e5  # beyond float16
    return pairs


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def torch_loop(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Train with torch's own loop of accumulation; return the scales and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    scales = []
    for inputs, targets in windows():
        optimizer.zero_grad()
        for x, y in zip(inputs, targets):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model(x), y) / MICRO_BATCHES
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: value.detach() for name, value in model.named_parameters()}


def trained(model: nn.Module, wrap: Callable[[Any], Any], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    config = ScalerConfig(init_scale=2.0**20, growth_interval=2)
    step = make_train_step(module_loss(model, loss_of), SGD, config, policy="float16", **options)
    run, state, scales = wrap(step), step.init(), []
    for batch in windows():
        state, _ = run(state, batch)
        scales.append(state.scaler.scale.item())
    return scales, dict(state.params.tree())


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("kind", [UsedTwice, TiedEmbedding])
def test_a_weight_used_twice_is_cast_once(kind: Callable[[], nn.Module]) -> None:
    scales, params = torch_loop(made(kind))
    assert len(set(scales)) > 2
    found_scales, found = trained(made(kind), traced, accumulate=MICRO_BATCHES)
    assert found_scales == scales
    assert_same(found, params)


class Inverse(nn.Module):
    """Inside of pinverse autocast is off, and inside of pinv it is on."""

    def __init__(self, invert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH) / 20)
        self.invert = invert

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.invert(self.matrix)


class Distances(nn.Module):
    """Autocast does not reach the kernel from cdist."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.matrix, compute_mode="use_mm_for_euclid_dist")


@pytest.mark.parametrize("kind", [lambda: Inverse(torch.pinverse), Distances])
def test_kernels_without_casts_inside_are_as_in_eager_code(kind: Callable[[], nn.Module]) -> None:
    expected = torch_loop(made(kind))
    assert_same(trained(made(kind), traced, accumulate=MICRO_BATCHES), expected)
