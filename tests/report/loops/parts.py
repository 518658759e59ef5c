"""What the loops share: a small model with an optimizer, batches, and a scaler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def scaler_of(init_scale: float = 2.0**10) -> torch.amp.GradScaler:
    """A scaler whose first scale does not overflow."""
    return torch.amp.GradScaler("cpu", init_scale=init_scale)


def batches(count: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        x = torch.randn(3, 4)
        yield x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch, by a forward pass in float16."""
    with torch.autocast("cpu", torch.float16):
        return mse_loss(model(x), y)


def losses(model: nn.Module, count: int = 6) -> Iterator[Tensor]:
    """The loss of each batch."""
    for x, y in batches(count):
        yield loss_of(model, x, y)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def one_process() -> None:
    """Start a process group of one process."""
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
