"""A small float16 run for tests of clients: the scale falls in the first steps, falls at one batch, and grows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import funcamp

STEPS, SIZE = 24, 4
HUGE = 11  # this batch overflows float16 in the forward pass, whatever the scale
NUMBERS: dict[str, Any] = {"init_scale": 2.0**19, "growth_interval": 5}

FUNCAMP: dict[str, Callable[..., torch.amp.GradScaler]] = {
    skip or "default": functools.partial(funcamp.GradScaler, "cpu", skip=skip) for skip in (None, "host", "select")
}
SCALERS = FUNCAMP | {"torch": functools.partial(torch.amp.GradScaler, "cpu")}

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": functools.partial(optim.SGD, lr=1e-2, momentum=0.9),
    "adamw": functools.partial(optim.AdamW, lr=1e-2),
    "fused": functools.partial(optim.AdamW, lr=1e-2, fused=True),
}


def make_model() -> nn.Sequential:
    """The model; it seeds torch's generator."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))


def make_data() -> tuple[Tensor, Tensor]:
    """Inputs and targets of all batches, one after another."""
    x = torch.randn(STEPS * SIZE, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    x[HUGE * SIZE] = 1e30
    return x, y


def assert_moves(scales: Sequence[float]) -> None:
    """The scale falls and grows, so that the run shows both."""
    assert any(after < before for before, after in itertools.pairwise(scales))
    assert any(after > before for before, after in itertools.pairwise(scales))
