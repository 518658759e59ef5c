"""TD3: two critics, a delayed actor and target networks in one compiled step.

    python examples/recipes/td3.py

One call is two updates of the critics and one of the actor, so nothing is computed that the delay would drop. A target
network is an average, a part of its optimizer: the actor's moves with the actor, that of the critics every second time.
Watch `distance`: how far from 0 the policy, trained on random moves, leaves a walker after five steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG, TAU, DISCOUNT = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10), 0.05, 0.8


def batch(index: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return two batches of places, moves, and noise for the target policy."""
    generator = torch.Generator().manual_seed(index)
    place, move = 4 * torch.rand(2, 2, 128, 1, generator=generator) - 2
    noise = (0.2 * torch.randn(2, 128, 1, generator=generator)).clamp(-0.5, 0.5)
    return place.to(device), (move / 2).to(device), noise.to(device)


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
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh()), Critics()


def criterion(values: Tensor, target: Tensor) -> Tensor:
    return (values.float() - target).square().mean(0).sum()


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return both networks' parameters after some steps, and the metrics of every update; wrap may compile the step."""
    actor, critics = [model.to(device) for model in make_models()]
    adam, target = funcamp.stateless(torch.optim.Adam, lr=3e-3), funcamp.average(1 - TAU)

    def minus_value(move: Tensor, given: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        place, params = given
        values: Tensor = functional_call(critics, params, (place, move))
        return -values[:, 0].float().mean()

    def step_of(model: nn.Module, loss: Callable[..., Tensor], optimizer: Any) -> funcamp.TrainStep:
        return funcamp.make_train_step(funcamp.module_loss(model, loss), optimizer, CONFIG, policy="float16")

    a_step = step_of(actor, minus_value, funcamp.chain(adam, target))
    c_step = step_of(critics, criterion, funcamp.chain(adam, funcamp.every(2, target)))

    def step(states: Any, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, Any]:
        (a_state, c_state), rows = states, []
        a_target = a_step.compute_params(a_state._replace(params=a_state.ema))
        for place, move, noise in zip(*batch):
            c_target = c_step.compute_params(c_state._replace(params=c_state.ema))
            after = place + move
            with c_step.autocast(c_state):
                next_move = (functional_call(actor, a_target, after) + noise).clamp(-1, 1)
                value = functional_call(critics, c_target, (after, next_move)).amin(1, keepdim=True)
            c_state, row = c_step(c_state, (place, move, DISCOUNT * value.float() - after.square()))
            rows.append(row)
        a_state, row = a_step(a_state, (place, (place, c_step.compute_params(c_state))))
        return (a_state, c_state), (*rows, row)

    run, states, history = wrap(step), (a_step.init(), c_step.init()), []
    for index in range(steps):
        states, rows = run(states, batch(index, device))
        history.append(rows)
    return [state.params.tree() for state in states], history


def main(steps: int = 200, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    (policy, _), history = train(steps, wrap, device)
    actor, place = make_models()[0].to(device), torch.linspace(-2, 2, 64, device=device)[:, None]
    first = place.abs().mean().item()
    with torch.no_grad():
        for _ in range(5):
            place = place + functional_call(actor, policy, place)
    last, (*_, c_row, a_row) = place.abs().mean().item(), history[-1]
    assert last < first / 2, (first, last)
    return {
        "distance_first": first,
        "distance_last": last,
        "skipped": c_row.skipped.item() + a_row.skipped.item(),
        "scale": min(c_row.scale.item(), a_row.scale.item()),
    }


if __name__ == "__main__":
    print(main())
