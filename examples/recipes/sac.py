"""SAC: two critics with a target, a random policy and its temperature, three optimizers in one compiled step.

    python examples/recipes/sac.py

Each update uses the parameters of the one before it, as in torch's loop, and each network has a separate scale. The
target is the average of the critics that their step keeps. Watch `distance`: how far from 0 the policy, trained on
random moves, leaves a walker after five steps; `temperature` follows the policy's entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG, TAU, DISCOUNT, ENTROPY = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10), 0.05, 0.8, -1.0


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    """Return places, moves, and noise for two draws of the policy."""
    generator = torch.Generator().manual_seed(index)
    place, move = 4 * torch.rand(2, 128, 1, generator=generator) - 2
    noise = torch.randn(2, 128, 1, generator=generator)
    return place.to(device), (move / 2).to(device), *noise.to(device)


class Critics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in "12"
        )

    def forward(self, place: Tensor, move: Tensor) -> Tensor:
        return torch.cat([critic(torch.cat([place, move], 1)) for critic in self.both], 1)


def make_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 2)), Critics()


def drawn(output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return moves from -1 to 1, and the logarithms of their densities (without a constant)."""
    mean, log_std = output.float().chunk(2, 1)
    log_std = log_std.clamp(-5, 1)
    move = torch.tanh(mean + log_std.exp() * noise)
    return move, -log_std - noise.square() / 2 - torch.log(1 - move.square() + 1e-6)


def criterion(values: Tensor, target: Tensor) -> Tensor:
    return (values.float() - target).square().mean(0).sum()


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return all parameters after some steps, and the metrics of both networks; wrap may compile the step."""
    actor, critics = [model.to(device) for model in make_models()]
    adam = funcamp.stateless(torch.optim.Adam, lr=3e-3)

    def actor_loss(output: Tensor, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        place, noise, params, log_alpha = given
        move, log_density = drawn(output, noise)
        value = functional_call(critics, params, (place, move)).amin(1, keepdim=True)
        return (log_alpha.exp() * log_density - value.float()).mean(), log_density

    def alpha_loss(params: dict[str, Tensor], log_density: Tensor) -> Tensor:
        return -(params["log_alpha"] * (log_density + ENTROPY)).mean()

    a_loss = funcamp.module_loss(actor, actor_loss, has_aux=True)
    a_step = funcamp.make_train_step(a_loss, adam, CONFIG, policy="float16")
    c_loss = funcamp.module_loss(critics, criterion)
    c_step = funcamp.make_train_step(c_loss, adam, CONFIG, policy="float16", ema_decay=1 - TAU)
    t_step = funcamp.make_train_step(alpha_loss, adam, funcamp.presets.disabled())

    def step(states: Any, batch: tuple[Tensor, ...]) -> tuple[Any, Any]:
        (a_state, c_state, t_state), (place, move, *noises) = states, batch
        after, log_alpha = place + move, t_state.params["log_alpha"]
        target = c_step.compute_params(c_state._replace(params=c_state.ema))
        with c_step.autocast(c_state):
            next_move, log_density = drawn(functional_call(actor, a_step.compute_params(a_state), after), noises[0])
            value = functional_call(critics, target, (after, next_move)).amin(1, keepdim=True).float()
        value = value - log_alpha.exp() * log_density
        c_state, c_row = c_step(c_state, (place, move, DISCOUNT * value - after.square()))
        a_state, a_row = a_step(a_state, (place, (place, noises[1], c_step.compute_params(c_state), log_alpha)))
        t_state, _ = t_step(t_state, a_row.aux)
        return (a_state, c_state, t_state), (c_row, a_row)

    begin = a_step.init(), c_step.init(), t_step.init({"log_alpha": torch.zeros((), device=device)})
    run, states, history = wrap(step), begin, []
    for index in range(steps):
        states, rows = run(states, batch(index, device))
        history.append(rows)
    return [state.params.tree() for state in states], history


def main(steps: int = 200, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    (policy, _, temperature), history = train(steps, wrap, device)
    actor, place = make_models()[0].to(device), torch.linspace(-2, 2, 64, device=device)[:, None]
    first = place.abs().mean().item()
    with torch.no_grad():
        for _ in range(5):
            place = place + functional_call(actor, policy, place)[:, :1].tanh()
    last, (c_row, a_row) = place.abs().mean().item(), history[-1]
    assert last < first / 2, (first, last)
    return {
        "distance_first": first,
        "distance_last": last,
        "temperature": temperature["log_alpha"].exp().item(),
        "skipped": c_row.skipped.item() + a_row.skipped.item(),
        "scale": min(c_row.scale.item(), a_row.scale.item()),
    }


if __name__ == "__main__":
    print(main())
