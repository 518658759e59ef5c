"""A model with layers of every kind for float8, and a short run of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcamp import ScalerConfig, float8, stateless
from tests.support.models import Task
from tests.support.steps import build, eager

ADAMW = stateless(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """A layer used twice, one that does not fit, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(16, 32), nn.Linear(32, 32)
        self.conv, self.norm = nn.Conv1d(32, 32, 1), nn.LayerNorm(32)
        self.odd, self.head = nn.Linear(24, 16), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.gelu(self.first(x)))
        x = self.norm(self.middle(self.conv(x[..., None])[..., 0]))
        out: Tensor = self.head(x + self.odd(x[..., :24]).repeat(1, 2))
        return out


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def converted(config: float8.Float8Config = float8.Float8Config(), kind: type[Net] = Net) -> Net:
    """The model with its layers in float8, but for the one that does not fit."""
    model = net(kind)
    float8.convert(model, config, keep=["odd"])
    return model


def batch(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(size, 16, generator=draw), torch.randint(48, (size,), generator=draw)


def made(model: nn.Module, scale: float = 2.0**8, **options: Any) -> Any:
    """A step in bfloat16."""
    task = Task(model, F.cross_entropy, batch)
    return build(task, ADAMW, config=ScalerConfig(scale), policy="bfloat16", **options)


def trained(model: nn.Module, wrap: Any = eager, **options: Any) -> Any:
    """The state's tensors by name and the losses of four steps."""
    step = made(model, **options)
    state, run, losses = step.init(), wrap(step), []
    for number in range(4):
        x, y = batch(number)
        parts = options.get("accumulate", 1)
        state, metrics = run(state, (x, y) if parts == 1 else (x.view(parts, -1, 16), y.view(parts, -1)))
        assert metrics.found_inf == 0
        losses.append(metrics.loss)
    return step.state_dict(state), losses
