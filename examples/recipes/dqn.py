"""DQN: the target network is the average of the parameters that the step keeps.

    python examples/recipes/dqn.py

A step with `ema_decay=1 - TAU` moves its average by `average += TAU * (params - average)`: the polyak update of a
target network, as a part of the step, which a skipped step leaves out too. Watch `distance`: how far from 0 the policy,
trained on random moves, leaves a walker after five steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG, TAU, DISCOUNT, MOVES = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10), 0.05, 0.8, (-0.5, 0.0, 0.5)


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    """Return transitions: places, numbers of moves, rewards, next places, and whether these are outside and the end."""
    generator = torch.Generator().manual_seed(index)
    place = 4 * torch.rand(128, 1, generator=generator) - 2
    action = torch.randint(len(MOVES), (128,), generator=generator)
    after = place + torch.tensor(MOVES)[action][:, None]
    distance = after[:, 0].abs()
    return tuple(part.to(device) for part in (place, action, 1 - distance, after, (distance > 2).float()))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(MOVES)))


def criterion(values: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    action, wanted = given
    return nn.functional.smooth_l1_loss(values.gather(1, action[:, None])[:, 0].float(), wanted)


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return the parameters and the target's after some steps, and all metrics; wrap may compile the step."""
    model, adam = make_model().to(device), funcamp.stateless(torch.optim.Adam, lr=3e-3)
    loss_fn = funcamp.module_loss(model, criterion)
    q_step = funcamp.make_train_step(loss_fn, adam, CONFIG, policy="float16", ema_decay=1 - TAU)

    def step(state: funcamp.TrainState, batch: tuple[Tensor, ...]) -> tuple[funcamp.TrainState, Any]:
        place, action, reward, after, done = batch
        target = q_step.compute_params(state._replace(params=state.ema))
        with q_step.autocast(state):
            value = functional_call(model, target, after).amax(1).float()
        return q_step(state, (place, (action, reward + DISCOUNT * (1 - done) * value)))

    run, state, history = wrap(step), q_step.init(), []
    for index in range(steps):
        state, metrics = run(state, batch(index, device))
        history.append(metrics)
    return {"params": state.params.tree(), "target": state.ema.tree()}, history


def main(steps: int = 200, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    trained, history = train(steps, wrap, device)
    model, place = make_model().to(device), torch.linspace(-2, 2, 64, device=device)[:, None]
    first, moves = place.abs().mean().item(), torch.tensor(MOVES, device=device)
    with torch.no_grad():
        for _ in range(5):
            place = place + moves[functional_call(model, trained["params"], place).argmax(1, keepdim=True)]
    last = place.abs().mean().item()
    assert last < first / 2, (first, last)
    metrics = history[-1]
    return {
        "distance_first": first,
        "distance_last": last,
        "loss_last": metrics.loss.item(),
        "skipped": metrics.skipped.item(),
        "scale": metrics.scale.item(),
    }


if __name__ == "__main__":
    print(main())
