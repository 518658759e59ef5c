"""BatchNorm, dropout and tied weights in one model: buffers, random numbers and shared parameters.

    python examples/recipes/layers.py

Watch `accuracy`: measured in eval mode, from the running statistics, in a plain module that got the state back. Buffers
are part of the state and are reverted at a skipped step; keep_buffers=True keeps what a skipped step wrote, as torch's
loop does. Dropout draws the eager loop's numbers; compiled by Inductor it draws others, unless jit gets exact=True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
WORDS, WIDTH, LR = 16, 32, 0.2


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    """Return three words; the target is the word that follows the second."""
    x = torch.randint(WORDS, (64, 3), generator=torch.Generator().manual_seed(index))
    return x.to(device), ((x[:, 1] + 1) % WORDS).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    nn.init.normal_(embedding.weight, std=WIDTH**-0.5)
    head.weight = embedding.weight  # tied: float32 for the lookup, float16 for the product
    hidden = [nn.Linear(3 * WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(embedding, nn.Flatten(), *hidden, nn.Linear(WIDTH, WIDTH), head)


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu", keep_buffers: bool = True
) -> tuple[dict[str, dict[str, Tensor]], list[Any]]:
    """Return the parameters and buffers after some steps, tied ones once, and every step's metrics."""
    loss_fn = funcamp.module_loss(make_model().to(device), criterion, keep_buffers=keep_buffers)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(), []
    torch.manual_seed(1)  # for dropout
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return {"params": state.params.tree(), "buffers": state.buffers}, history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    values, history = train(steps, wrap, device)
    model = make_model().to(device).eval()
    model.load_state_dict(funcamp.module_loss(model, criterion).state_dict(**values))
    x, y = batch(steps, device)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    assert accuracy > 0.9, accuracy
    return {
        "accuracy": accuracy,
        "loss_last": history[-1].loss.item(),
        "skipped": history[-1].skipped.item(),
        "scale": history[-1].scale.item(),
    }


if __name__ == "__main__":
    print(main())
