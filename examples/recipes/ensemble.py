"""An ensemble in one program: vmap over the training step, with a scale and skips per member.

    python examples/recipes/ensemble.py

Watch a member overflow: only its step is skipped and only its scale is halved, while the others step. One scaler for
the ensemble would skip all of them if one overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import funcamp

CONFIG = funcamp.ScalerConfig(growth_interval=10)
INIT_SCALES = [2.0**24, 2.0**20, 2.0**16, 2.0**12]
LR = 0.05


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index))
    return x.to(device), x.sin().sum(1, keepdim=True).to(device)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the members' parameters, stacked, and every step's metrics, a number for each member."""
    models = [make_model(seed).to(device) for seed in range(len(INIT_SCALES))]
    params, _ = stack_module_state(models)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    step = funcamp.make_train_step(funcamp.module_loss(models[0], criterion), sgd, CONFIG, policy="float16")
    state = vmap(step.init)(params)
    state = state._replace(scaler=state.scaler._replace(scale=torch.tensor(INIT_SCALES, device=device)))
    run, history = wrap(vmap(step, in_dims=(0, None))), []  # every member gets the same batch
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return vmap(lambda member: member.params.tree())(state), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    params, history = train(steps, wrap, device)
    first, last = history[0].loss.mean().item(), history[-1].loss.mean().item()
    assert last < first / 2, (first, last)
    alone = sum(0 < metrics.found_inf.sum() < len(INIT_SCALES) for metrics in history)
    assert alone >= 1
    model, (x, y) = make_model(0).to(device), batch(steps, device)
    outputs = vmap(lambda values: functional_call(model, values, x))(params)
    together, each = criterion(outputs.mean(0), y).item(), criterion(outputs, y.expand_as(outputs)).item()
    assert together < each, (together, each)
    return {
        "loss_first": first,
        "loss_of_a_member": each,
        "loss_of_the_mean": together,
        "steps_where_some_skipped": int(alone),
        "skipped": int(history[-1].skipped.sum()),
    }


if __name__ == "__main__":
    print(main())
