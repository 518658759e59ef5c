"""A GAN: two networks that take turns in one compiled step, each with a separate optimizer and scale.

    python examples/recipes/gan.py

Watch `gap`, from the mean of the generated points to that of the real ones. Each network uses the other's
parameters as constants (`compute_params`): no detach, no zero_grad, and no gradient that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)


class Row(NamedTuple):
    gap: Tensor
    scale: Tensor  # (2,), as found_inf: the generator's, the discriminator's
    found_inf: Tensor


def batch(index: int, device: str) -> tuple[Tensor, Tensor]:
    points, noise = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(index)).to(device)
    return 0.5 * points + torch.tensor([2.0, -1.0], device=device), noise


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, outputs)) for outputs in (2, 1)]


def criterion(logits: Tensor, is_real: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), is_real)


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Row]]:
    """Return the parameters after some steps, and every step's row; wrap may compile the step."""
    generator, discriminator = [model.to(device) for model in make_models()]
    adam = funcamp.stateless(torch.optim.Adam, lr=1e-2, betas=(0.5, 0.9))

    def passes_for_real(fake: Tensor, d_params: dict[str, Tensor]) -> Tensor:
        return criterion(functional_call(discriminator, d_params, fake), torch.ones_like(fake[:, :1].float()))

    losses = funcamp.module_loss(generator, passes_for_real), funcamp.module_loss(discriminator, criterion)
    g_step, d_step = [funcamp.make_train_step(loss, adam, CONFIG, policy="float16") for loss in losses]

    def step(states: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, Row]:
        (g_state, d_state), (real, noise) = states, batch
        with g_step.autocast(g_state):
            fake = functional_call(generator, g_step.compute_params(g_state), noise).float()
        is_real = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
        d_state, d_row = d_step(d_state, (torch.cat([real, fake]), is_real))
        g_state, g_row = g_step(g_state, (noise, d_step.compute_params(d_state)))
        scale, found_inf = torch.stack([g_row.scale, d_row.scale]), torch.stack([g_row.found_inf, d_row.found_inf])
        return (g_state, d_state), Row((fake.mean(0) - real.mean(0)).norm(), scale, found_inf)

    run, states, history = wrap(step), (g_step.init(), d_step.init()), []
    for index in range(steps):
        states, row = run(states, batch(index, device))
        history.append(row)
    return [state.params.tree() for state in states], history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    rows = Row(*map(torch.stack, zip(*train(steps, wrap, device)[1])))
    first, last = rows.gap[0].item(), rows.gap[-10:].mean().item()
    assert last < first / 4, (first, last)
    skipped, scale = rows.found_inf.amax(1).sum().item(), rows.scale[-1].min().item()
    return {"gap_first": first, "gap_last": last, "skipped": skipped, "scale": scale}


if __name__ == "__main__":
    print(main())
