"""Gradient accumulation: a step over 4 micro-batches, for a batch that does not fit into memory.

    python examples/recipes/accumulation.py

Watch `partial`: an epoch of 10 micro-batches has windows of 4, 4 and 2, and the last is divided by 2. Each window size
is one compiled program, so there are two. An overflow in one micro-batch skips its window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
WINDOW, EPOCH = 4, 10  # micro-batches


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a window of WINDOW micro-batches, or fewer at the end of an epoch, along the first dimension."""
    windows = -(-EPOCH // WINDOW)
    size = min(WINDOW, EPOCH - WINDOW * (index % windows))
    x = torch.randn(size, 16, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(2, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and all metrics."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion)
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16", accumulate=WINDOW)
    run, state, history = wrap(step), step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    first, last = history[0].loss.item(), torch.stack([metrics.loss for metrics in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    partial = sum(len(batch(index, "cpu")[0]) < WINDOW for index in range(steps))
    assert partial == steps // 3, partial
    return {
        "partial": partial,
        "loss_first": first,
        "loss_last": last,
        "skipped": history[-1].skipped.item(),
        "scale": history[-1].scale.item(),
    }


if __name__ == "__main__":
    print(main())
