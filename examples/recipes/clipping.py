"""Gradient clipping, by global norm or by value: for a loss whose gradient is sometimes far too large.

    python examples/recipes/clipping.py

Watch `clipped`, the steps whose norm was above MAX_NORM, and `norm_largest`: at this learning rate the loop diverges
without clipping. The norm is that of the unscaled gradients, so MAX_NORM does not depend on the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, MAX_NORM = 0.05, 1.0


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), 10 * x.sin().sum(1, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int,
    wrap: Callable[[Any], Any] = funcamp.jit,
    device: str = "cpu",
    max_norm: float | None = MAX_NORM,
    max_value: float | None = None,
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and all metrics, with one of the two limits or none."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16", max_norm=max_norm, max_value=max_value)
    run, state, history = wrap(step), step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    norms = torch.stack([metrics.grad_norm for metrics in history])  # before the clip
    applied = torch.stack([metrics.found_inf for metrics in history]) == 0
    clipped = int((norms[applied] > MAX_NORM).sum())
    assert clipped > steps // 3, clipped
    first, last = history[0].loss.item(), torch.stack([metrics.loss for metrics in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    return {
        "loss_first": first,
        "loss_last": last,
        "clipped": clipped,
        "norm_largest": norms[applied].max().item(),
        "skipped": history[-1].skipped.item(),
        "scale": history[-1].scale.item(),
    }


if __name__ == "__main__":
    print(main())
