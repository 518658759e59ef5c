"""Per-sample gradients, clipped, with noise: differentially private SGD in float16, by vmap.

    python examples/recipes/per_sample.py

Watch the order: each gradient is unscaled before its norm is computed; otherwise the limit would depend on the scale. A
sample that overflows skips the step, or with DROP counts as zero. The scale reveals it; privacy accountants ignore it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
LR, MAX_NORM, NOISE, DROP = 0.5, 1.0, 0.1, False
Row = namedtuple("Row", ["loss", "clipped", "scale", "found_inf"])


def batch(index: int, device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(16, 8, generator=generator)
    noise = {name: torch.randn(p.shape, generator=generator).to(device) for name, p in make_model().named_parameters()}
    return x.to(device), x.sin().sum(1, keepdim=True).to(device), noise


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row."""
    model, sgd = make_model().to(device), funcamp.stateless(torch.optim.SGD, lr=LR)

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.float16):
            return nn.functional.mse_loss(functional_call(model, params, x[None]).float(), y[None])

    def step(state: Any, batch: Any) -> tuple[Any, Row]:
        (params, sgd_state, scaler), (x, y, noise) = state, batch

        def one(x: Tensor, y: Tensor) -> Any:
            (grads, checked), loss = funcamp.scaled_grad_and_value(loss_fn)(scaler, params, x, y)
            grads, norm = funcamp.clip_grad_norm(grads, MAX_NORM)
            zeros = {name: torch.zeros_like(grad) for name, grad in grads.items()}
            return funcamp.skip_step(checked, new=grads, old=zeros), norm, checked.found_inf, loss

        grads, norms, found, losses = vmap(one)(x, y)
        mean = {name: (grad.sum(0) + NOISE * MAX_NORM * noise[name]) / len(x) for name, grad in grads.items()}
        scaler = funcamp.ScalerState(scaler.scale, scaler.growth_tracker, found.amax())
        new = sgd.update(params, mean, sgd_state)
        after = new if DROP else funcamp.skip_step(scaler, new=new, old=(params, sgd_state))
        row = Row(losses.mean(), (norms > MAX_NORM).sum(), scaler.scale, scaler.found_inf)
        return (*after, funcamp.update(scaler, CONFIG)), row

    params = {name: value.detach() for name, value in model.named_parameters()}
    run, state, history = wrap(step), (params, sgd.init(params), funcamp.init(CONFIG, device=device)), []
    for index in range(steps):
        state, row = run(state, batch(index, device))
        history.append(row)
    return state[0], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    first, *_, last = (part.mean().item() for part in torch.stack([row.loss for row in history]).chunk(10))
    clipped = sum(row.clipped.item() for row in history if not row.found_inf)
    assert all([last < first / 2, clipped > 0]), (first, last, clipped)
    return {"first": first, "last": last, "clipped": clipped, "skipped": sum(row.found_inf.item() for row in history)}


if __name__ == "__main__":
    print(main())
