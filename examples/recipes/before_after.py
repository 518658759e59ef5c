"""Porting a torch.amp loop: the same training before and after; lines with the same number correspond.

    python examples/recipes/before_after.py

Watch `difference`: the relative distance of the two results. Gone: zero_grad and all reads on the host.
New: the model does not change until 7, because the values are in the state; and `run` consumes the state it gets.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import funcamp


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def before(steps: int, device: str = "cpu") -> tuple[dict[str, Tensor], list[tuple[float, float, bool]]]:
    model, history = make_model().to(device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # 1
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=10)  # 2
    for index in range(steps):
        x, y = batch(index, device)
        with torch.autocast(device, torch.float16):  # 3
            loss = criterion(model(x), y)  # 4
        scaler.scale(loss).backward()  # 5
        scaler.unscale_(optimizer)  # 5
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)  # 6
        scaler.step(optimizer)  # 5
        scale = scaler.get_scale()
        scaler.update()  # 5
        optimizer.zero_grad()
        history.append((loss.item(), scale, scaler.get_scale() < scale))
    return model.state_dict(), history


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    model, history = make_model().to(device), []
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=1e-2)  # 1
    config = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)  # 2
    loss_fn = funcamp.module_loss(model, criterion)  # 4
    step = funcamp.make_train_step(loss_fn, optimizer, config, policy="float16", max_norm=2.0)  # 3 and 6
    run, state = wrap(step), step.init(consume=True)
    for index in range(steps):
        state, metrics = run(state, batch(index, device))  # 3 to 6, one program
        history.append(metrics)  # tensors: loss, scale, found_inf, grad_norm and more
    model.load_state_dict(loss_fn.state_dict(state.params))  # 7
    return model.state_dict(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    (expected, old), (params, new) = before(steps, device), train(steps, wrap, device)
    difference = max(((params[name] - value).norm() / value.norm()).item() for name, value in expected.items())
    assert difference < 0.05, difference
    assert old[-1][0] < old[0][0] / 2, old
    numbers = {"difference": difference, "loss_before": old[-1][0], "loss_after": new[-1].loss.item()}
    return {**numbers, "skipped_before": sum(row[2] for row in old), "skipped": new[-1].skipped.item()}


if __name__ == "__main__":
    print(main())
