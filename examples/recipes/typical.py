"""The typical loop in float16, to start from: autocast, a scaled loss, AdamW, a dynamic scale.

    python examples/recipes/typical.py

Watch `skipped` and `scale`: it starts far too high, each overflow halves it, and a skipped step changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and every step's metrics; wrap may compile the step."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    step = funcamp.make_train_step(loss_fn, adamw, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(consume=True), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    first, last = history[0].loss.item(), torch.stack([metrics.loss for metrics in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    return {
        "loss_first": first,
        "loss_last": last,
        "skipped": history[-1].skipped.item(),
        "scale": history[-1].scale.item(),
    }


if __name__ == "__main__":
    print(main())
