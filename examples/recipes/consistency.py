"""Consistency training with few labels: a loss runs a network with and without a gradient.

    python examples/recipes/consistency.py

Watch `accuracy` on new points: 0.90 with 8 labels, 0.79 without the second term. The pass without a gradient may come
first, as in torch's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, labelled: Tensor, plain: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            target = self.net(plain).float().softmax(1)
        return self.net(labelled).float(), self.net(noisy).float(), target


def points(index: int, count: int) -> tuple[Tensor, Tensor]:
    """Return points of four clusters, and the cluster of each."""
    label = torch.arange(count) % 4
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(index)) + 3 * torch.eye(4, 16)[label], label


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    (labelled, label), (plain, _) = points(0, 8), points(100 + index, 64)
    noisy = plain + torch.randn(64, 16, generator=torch.Generator().manual_seed(index))
    return labelled.to(device), plain.to(device), noisy.to(device), label.to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def criterion(outputs: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    labelled, noisy, target = outputs
    return nn.functional.cross_entropy(labelled, label) + 2 * (noisy.softmax(1) - target).square().sum(1).mean()


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return the parameters after some steps, and every step's metrics; wrap may compile the step."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion)
    sgd = funcamp.stateless(torch.optim.SGD, lr=1e-1)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    params, history = train(steps, wrap, device)
    x, label = (tensor.to(device) for tensor in points(-1, 1000))
    outputs, _, _ = functional_call(make_model().to(device), params, (x, x, x))
    accuracy = (outputs.argmax(1) == label).float().mean().item()
    assert accuracy > 0.85, accuracy
    return {"accuracy": accuracy, "skipped": history[-1].skipped.item(), "scale": history[-1].scale.item()}


if __name__ == "__main__":
    print(main())
