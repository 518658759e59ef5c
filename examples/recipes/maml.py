"""MAML: learn parameters from which one differentiated gradient step solves a new task.

    python examples/recipes/maml.py

Watch both gradients: the inner one is scaled, and unscaled before it moves a parameter; the outer one differentiates
through all of that. Both use one scale. The tasks run side by side under vmap; one that overflows skips the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, INNER_LR, TASKS, SHOTS = 0.02, 0.1, 8, 10


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    """Return random sines: inputs and targets to adapt with, and others to test with."""
    generator = torch.Generator().manual_seed(index)
    amplitude = 1 + torch.rand(TASKS, 1, 1, generator=generator)
    phase = math.pi / 2 * torch.rand(TASKS, 1, 1, generator=generator)
    x = 4 * torch.rand(TASKS, 2 * SHOTS, 1, generator=generator) - 2
    (support_x, query_x), (support_y, query_y) = x.chunk(2, 1), (amplitude * (x + phase).sin()).chunk(2, 1)
    return tuple(value.to(device) for value in (support_x, support_y, query_x, query_y))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def train(
    steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu"
) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the parameters after some steps, and all metrics; aux is the loss before the inner step."""
    model = make_model().to(device)

    def loss_of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(functional_call(model, params, x).float(), y)

    def tasks(params: dict[str, Tensor], scaler: funcamp.ScalerState, batch: tuple[Tensor, ...]) -> Any:
        def task(slow: dict[str, Tensor], support_x: Tensor, support_y: Tensor, *query: Tensor) -> Any:
            (grads, _), _ = funcamp.scaled_grad_and_value(loss_of)(scaler, slow, support_x, support_y)
            fast = {name: value - INNER_LR * grads[name] for name, value in slow.items()}
            return loss_of(fast, *query), loss_of(slow, *query)

        # Separate parameters for each task, so that gradients are summed over the tasks in float32, not in float16.
        own = {name: value.expand(TASKS, *value.shape) for name, value in params.items()}
        after, before = vmap(task)(own, *batch)
        return after.mean(), before.mean()

    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    loss_fn = funcamp.loss(tasks, has_scaler=True, has_aux=True)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(dict(model.named_parameters())), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    rows = [torch.stack([metrics.loss, metrics.aux]) for metrics in history if not metrics.found_inf]
    (first, _), (adapted, before) = rows[0].tolist(), torch.stack(rows[-20:]).mean(0).tolist()
    assert adapted < first / 2, (first, adapted)
    assert adapted < before / 2, (adapted, before)
    return {"first": first, "adapted": adapted, "before": before, "skipped": history[-1].skipped.item()}


if __name__ == "__main__":
    print(main())
