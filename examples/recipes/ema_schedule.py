"""An average of the parameters and a learning-rate schedule; a skipped step advances neither.

    python examples/recipes/ema_schedule.py

Watch `lr` and `applied`: the schedule is a function of the count of applied steps, so the skips at the start do not
shorten the warm-up. A skipped step does not change the average either; `loss_ema` is its loss, on unseen batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, WARM_UP, END, DECAY = 0.05, 10, 90, 0.9


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def learning_rate(applied: Tensor) -> Tensor:
    """Return the learning rate after some applied steps as a tensor: warm-up, then a cosine."""
    cosine = 0.5 + 0.5 * torch.cos(torch.pi * ((applied - WARM_UP) / (END - WARM_UP)).clamp(0, 1))
    return LR * torch.where(applied < WARM_UP, (applied + 1) / WARM_UP, cosine)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, dict[str, Tensor]], list[Any]]:
    """Return the parameters and their average after some steps, and every step's metrics."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion)
    sgd = funcamp.stateless(torch.optim.SGD, lr=learning_rate, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16", ema_decay=DECAY)
    run, state, history = wrap(step), step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return {"params": state.params.tree(), "ema": state.ema.tree()}, history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    trees, history = train(steps, wrap, device)
    model = make_model().to(device)
    losses = {}
    for name, tree in trees.items():
        model.load_state_dict(funcamp.module_loss(model, criterion).state_dict(tree))
        losses[name] = sum(criterion(model(x), y).item() for x, y in (batch(steps + i, device) for i in range(10))) / 10
    assert max(losses.values()) < history[0].loss.item() / 2, losses
    return {
        "loss_last": losses["params"],
        "loss_ema": losses["ema"],
        "lr": learning_rate(history[-1].applied).item(),
        "applied": history[-1].applied.item(),
        "skipped": history[-1].skipped.item(),
        "scale": history[-1].scale.item(),
    }


if __name__ == "__main__":
    print(main())
