"""A large embedding with sparse gradients and SparseAdam: for a table of which a step uses few rows.

    python examples/recipes/sparse_embedding.py

Watch `touched`, the rows of the table that ever moved, and `skipped`. A sparse gradient has as many rows as the batch
has different words, which depends on values, so it cannot be part of a compiled step. So this is an ordinary loop with
funcamp.GradScaler instead of torch's, and `wrap` is not used. Each optimizer skips independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
WORDS, USED, WIDTH = 4096, 64, 16


class Row(NamedTuple):
    loss: Tensor
    scale: Tensor
    found_inf: Tensor


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    words = torch.randint(USED, (64, 3), generator=torch.Generator().manual_seed(index))
    return words.to(device), words.sin().sum(1, keepdim=True).to(device)


def make_model(sparse: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.GELU(), nn.Linear(32, 1))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH, sparse=sparse), nn.Flatten(), head)


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and every step's loss, scale and flag."""
    del wrap
    model = make_model().to(device)
    sparse = torch.optim.SparseAdam(model[0].parameters(), lr=1e-2)
    dense = torch.optim.AdamW(model[2].parameters(), lr=1e-2, fused=True)  # skips in its kernel
    scaler = funcamp.GradScaler(device, config=CONFIG, skip="host")  # reads the flag for SparseAdam, as torch does
    history = []
    for index in range(steps):
        words, target = batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = criterion(model(words), target)
        scaler.scale(loss).backward()
        scaler.step(sparse)
        scaler.step(dense)
        scale = scaler.metrics().scale
        scaler.update()
        history.append(Row(loss.detach(), scale, scaler.metrics().found_inf))
        model.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    params, history = train(steps, wrap, device)
    first, last = history[0].loss.item(), torch.stack([row.loss for row in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    touched = int(params["0.weight"].ne(make_model().get_parameter("0.weight").to(device)).any(1).sum())
    assert touched == USED, touched
    skipped = int(torch.stack([row.found_inf for row in history]).sum())
    return {"loss_first": first, "loss_last": last, "touched": touched, "skipped": skipped}


if __name__ == "__main__":
    print(main())
