"""SAM (Foret et al. 2021): two gradients in a step, the second at a point of higher loss.

    python examples/recipes/sam.py

Watch `skipped`: an overflow in either gradient skips the step and backs off once, because the second check starts from
the first one's state. torch's scaler unscales once in a step; here both gradients are unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, RHO = 1e-2, 0.05


class Row(NamedTuple):
    loss: Tensor
    scale: Tensor
    found_inf: Tensor
    rise: Tensor  # increase of the loss from the point to the climbed point


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index)).to(device)
    return x, x.sin().sum(1, keepdim=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row; wrap may compile the step."""
    model = make_model().to(device)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)

    @funcamp.scaled_grad_and_value
    def graded(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.float16):
            return criterion(torch.func.functional_call(model, params, x), y)

    def step(state: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, Row]:
        params, opt_state, scaler = state
        (grads, first), loss = graded(scaler, params, *batch)
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        climbed = {name: value + grads[name] * (RHO / (norm + 1e-12)) for name, value in params.items()}
        (grads, both), higher = graded(first, climbed, *batch)
        after = funcamp.skip_step(both, new=sgd.update(params, grads, opt_state), old=(params, opt_state))
        return (*after, funcamp.update(both, CONFIG)), Row(loss, scaler.scale, both.found_inf, higher - loss)

    params = funcamp.clone(dict(model.named_parameters()))
    run, state, history = wrap(step), (params, sgd.init(params), funcamp.init(CONFIG, device=device)), []
    for index in range(steps):
        state, row = run(state, batch(index, device))
        history.append(row)
    return state[0], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    rows = Row(*map(torch.stack, zip(*train(steps, wrap, device)[1])))
    first, last = rows.loss[0].item(), rows.loss[-10:].mean().item()
    assert last < first / 2, (first, last)
    assert rows.rise[rows.found_inf == 0].min() > 0, rows.rise
    return {"loss_first": first, "loss_last": last, "skipped": rows.found_inf.sum().item()}


if __name__ == "__main__":
    print(main())
