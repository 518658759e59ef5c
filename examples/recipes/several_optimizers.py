"""Several models, losses and optimizers with one scale; each optimizer skips independently.

    python examples/recipes/several_optimizers.py

Watch `skipped_alone`: steps in which one optimizer skipped and the other did not; the shared scale backs off then too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**18, growth_interval=10)


class Row(NamedTuple):
    losses: Tensor  # (2,): one of each loss
    scale: Tensor
    found_inf: Tensor  # (2,): one of each optimizer


def batch(index: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(index)).to(device)
    return x, x.sin().sum(1, keepdim=True), x.cos().sum(1, keepdim=True)


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1)) for width in (16, 32)]


def losses_of(models: list[nn.Module], params: Any, x: Tensor, y0: Tensor, y1: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.float16):
        out0, out1 = [torch.func.functional_call(model, own, x) for model, own in zip(models, params)]
        pairs = [(2 * out0 + 3 * out1, y0), (3 * out0 - 5 * out1, y1)]
        return torch.stack([nn.functional.mse_loss(output, target) for output, target in pairs])


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row; wrap may compile the step."""
    models = [model.to(device) for model in make_models()]
    optimizers = [funcamp.stateless(torch.optim.AdamW, lr=1e-2), funcamp.stateless(torch.optim.SGD, lr=1e-3)]

    def step(state: Any, batch: tuple[Tensor, ...]) -> tuple[Any, Row]:
        (old, scaler), new, checked = state, [], []
        losses, backward = torch.func.vjp(lambda own: losses_of(models, own, *batch), [own for own, _ in old])[:2]
        # A backward pass for each loss, as in torch's loop: their gradients add up in float32.
        (first,), (second,) = map(backward, funcamp.scale(scaler, torch.eye(2, device=device)))
        for optimizer, (params, opt), grads0, grads1 in zip(optimizers, old, first, second):
            grads, own = funcamp.unscale_and_check(scaler, {name: grads0[name] + grads1[name] for name in params})
            new.append(funcamp.skip_step(own, new=optimizer.update(params, grads, opt), old=(params, opt)))
            checked.append(own)
        row = Row(losses, scaler.scale, torch.stack([state.found_inf for state in checked]))
        return (new, funcamp.update(funcamp.merge(*checked), CONFIG)), row

    params = [funcamp.clone(dict(model.named_parameters())) for model in models]
    trained = [(p, optimizer.init(p)) for p, optimizer in zip(params, optimizers)]
    run, state, history = wrap(step), (trained, funcamp.init(CONFIG, device=device)), []
    for index in range(steps):
        state, row = run(state, batch(index, device))
        history.append(row)
    return [params for params, _ in state[0]], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    rows = Row(*map(torch.stack, zip(*train(steps, wrap, device)[1])))
    first, last = rows.losses[0].sum().item(), rows.losses[-10:].sum(1).mean().item()
    skipped, alone = rows.found_inf.amax(1).sum().item(), (rows.found_inf.sum(1) == 1).sum().item()
    assert last < first / 2, (first, last)
    assert alone >= 1
    return {"loss_first": first, "loss_last": last, "skipped": skipped, "skipped_alone": alone}


if __name__ == "__main__":
    print(main())
