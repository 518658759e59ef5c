"""Autocast casts a step's float32 parameters at their use, so that every dtype is that of torch's loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone

STEPS, ROWS, WIDTH, WORDS = 5, 6, 8, 16


class Net(nn.Module):
    """An embedding, one block, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.norm = nn.Conv1d(1, 1, 3, padding=1), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight

    def block(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        if self.kind == "twice":
            x = torch.tanh(self.first(x)) @ self.first.weight
        if self.kind == "conv":
            x = self.conv(x[:, None])[:, 0]
        if self.kind == "dtype":
            x = x.to(next(self.parameters()).dtype) * 1.001
        if self.kind == "penalty":
            x = x * (1 + 1e-2 * self.first.weight.square().sum())
        out: Tensor = self.norm(self.second(x))
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.kind == "checkpoint" else self.block(x)
        out: Tensor = self.head(x)
        return out


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (2 * ROWS,), generator=generator)
    return tokens, tokens.roll(1)


def by_torch(model: nn.Module, dtype: torch.dtype, accumulate: int) -> list[Any]:
    """The losses, scales and parameters of torch's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    history = []
    for number in range(STEPS):
        tokens, target = batch_of(number)
        losses = []
        for x, y in zip(tokens.chunk(accumulate), target.chunk(accumulate)):
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss / accumulate).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((torch.stack(losses).mean(), scaler.get_scale(), clone(dict(model.named_parameters()))))
    return history


def by_step(model: nn.Module, dtype: torch.dtype, accumulate: int, jitted: bool) -> list[Any]:
    """The same of a step."""
    sgd = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
    loss_fn = module_loss(model, lambda out, y: F.cross_entropy(out.float(), y))
    config = ScalerConfig(init_scale=2.0**20, growth_interval=2)
    step = make_train_step(loss_fn, sgd, config, policy=dtype, accumulate=accumulate)
    run: Any = jit(step, backend="eager") if jitted else step
    state, history = step.init(), []
    for number in range(STEPS):
        batch: Any = batch_of(number)
        if accumulate > 1:
            batch = tuple(part.reshape(accumulate, -1) for part in batch)
        state, metrics = run(state, batch)
        history.append((metrics.loss, state.scaler.scale.item(), clone(state.params.tree())))
    return history


@pytest.mark.usefixtures("one_thread")
@pytest.mark.compiled
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("kind", "dtype", "accumulate"),
    [
        ("twice", torch.float16, 1),
        ("twice", torch.bfloat16, 2),
        ("tied", torch.float16, 2),
        ("dtype", torch.bfloat16, 1),
        ("conv", torch.float16, 1),
        ("penalty", torch.float16, 1),
        ("checkpoint", torch.bfloat16, 2),
    ],
)
def test_a_step_is_torchs_loop_bit_for_bit(kind: str, dtype: torch.dtype, accumulate: int, jitted: bool) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    # What no forward pass uses has no gradient in torch's loop, and zeros in a step.
    if kind != "conv":
        model.conv.requires_grad_(False)
    expected = by_torch(copy.deepcopy(model), dtype, accumulate)
    found = by_step(model, dtype, accumulate, jitted)
    scales = [scale for _, scale, _ in found]
    assert scales == [scale for _, scale, _ in expected]
    if dtype == torch.float16:
        assert min(scales) < 2.0**20
    for (loss, _, params), (expected_loss, _, expected_params) in zip(found, expected):
        assert_same(loss, expected_loss)
        assert_same(params, {name: expected_params[name] for name in params})
