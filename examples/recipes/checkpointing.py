"""Activation checkpointing: blocks store no activations and are recomputed in the backward pass.

    python examples/recipes/checkpointing.py

Watch `checkpoint(block, x, use_reentrant=False)`: nothing else changes. Dropout uses one mask in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR = 0.02


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.first, self.last = checkpointed, nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.last(x).float()


def make_model(checkpointed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Model(checkpointed)


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return the parameters after some steps, and every step's metrics."""
    loss_fn = funcamp.module_loss(make_model().to(device), nn.functional.mse_loss)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def bytes_kept(checkpointed: bool, device: str) -> int:
    """Return the bytes that a forward pass stores for the backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: sizes.append(value.nbytes), lambda none: none):
        make_model(checkpointed).to(device)(batch(0, device)[0])
    return sum(sizes)


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    first, last = history[0].loss.item(), torch.stack([metrics.loss for metrics in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    kept, without = bytes_kept(True, device), bytes_kept(False, device)
    assert kept < without / 3, (kept, without)
    return {"first": first, "last": last, "kept": kept, "kept_without": without, "skipped": history[-1].skipped.item()}


if __name__ == "__main__":
    print(main())
