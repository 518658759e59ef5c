"""PPO: rollouts of the current policy, and an epoch of minibatches in one call.

    python examples/recipes/ppo.py

`jit(step, unroll=MINIBATCHES)` takes an update for each minibatch of a stack, and a permutation in that shape, as an
index into the rollout, makes the stack. An overflow skips one minibatch. Watch `distance`: how far from 0 walkers end,
by the first policy and by the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG, LR, MAX_NORM = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10), 1e-3, 0.5
STEPS, WALKERS, EPOCHS, MINIBATCHES = 8, 64, 4, 4
CLIP, VALUE, ENTROPY, DISCOUNT, LAMBDA = 0.2, 0.5, 0.01, 0.8, 0.95


class Rollout(NamedTuple):
    place: Tensor  # (STEPS * WALKERS, 1), as the others
    move: Tensor
    log_prob: Tensor
    advantage: Tensor
    returns: Tensor


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in "12")
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.actor(place), self.log_std, self.critic(place)


def batch(index: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return first places, the noise of moves, and the rows of an epoch's minibatches."""
    generator = torch.Generator().manual_seed(index)
    place = 4 * torch.rand(WALKERS, 1, generator=generator) - 2
    noise = torch.randn(STEPS, WALKERS, 1, generator=generator)
    order = torch.randperm(STEPS * WALKERS, generator=generator).view(MINIBATCHES, -1)
    return place.to(device), noise.to(device), order.to(device)


def make_model() -> Agent:
    torch.manual_seed(0)
    return Agent()


def log_prob_of(move: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -((move - mean) / log_std.exp()).square() / 2 - log_std - math.log(2 * math.pi) / 2


def walk(act: Callable[[Tensor], tuple[Tensor, ...]], place: Tensor, noise: Tensor) -> tuple[Rollout, Tensor]:
    """Let walkers act, and look back for advantages; also return where they end."""
    rows, rewards, estimates = [], [], []
    for draw in noise:
        mean, log_std, value = (part.float() for part in act(place))
        move = mean + log_std.exp() * draw
        rows.append((place, move, log_prob_of(move, mean, log_std), value))
        place = place + move.clamp(-1, 1)
        rewards.append(-place.square())
    next_value, advantage = act(place)[2].float(), torch.zeros_like(place)
    for reward, (*_, value) in zip(rewards[::-1], rows[::-1]):
        advantage = reward + DISCOUNT * next_value - value + DISCOUNT * LAMBDA * advantage
        estimates.append(advantage)
        next_value = value
    places, moves, log_probs, values = (torch.cat(column) for column in zip(*rows))
    advantages = torch.cat(estimates[::-1])
    return Rollout(places, moves, log_probs, advantages, advantages + values), place


def criterion(outputs: tuple[Tensor, Tensor, Tensor], rows: Rollout) -> Tensor:
    """Return the clipped surrogate with the error of the value, less the entropy."""
    mean, log_std, value = (part.float() for part in outputs)
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    ratio = (log_prob_of(rows.move, mean, log_std) - rows.log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    return VALUE * (value - rows.returns).square().mean() - gain - ENTROPY * log_std.sum()


def train(steps: int, wrap: Callable[..., Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return the parameters after some epochs, and every epoch's stacked metrics; wrap may compile the step."""
    agent, adam = make_model().to(device), funcamp.stateless(torch.optim.Adam, lr=LR, eps=1e-5)
    loss_fn = funcamp.module_loss(agent, criterion)
    step = funcamp.make_train_step(loss_fn, adam, CONFIG, policy="float16", max_norm=MAX_NORM)
    run, state, history = wrap(step, unroll=MINIBATCHES), step.init(), []
    for index in range(steps):
        place, noise, order = batch(index, device)
        if index % EPOCHS == 0:  # the rollout of the next EPOCHS epochs
            params = step.compute_params(state)
            with step.autocast(state):
                rollout, _ = walk(partial(functional_call, agent, params), place, noise)
        rows = Rollout(*[column[order] for column in rollout])
        state, metrics = run(state, (rows.place, rows))
        history.append(metrics)
    return state.params.tree(), history


def main(steps: int = 200, wrap: Callable[..., Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    params, history = train(steps, wrap, device)
    agent, (place, noise, _) = make_model().to(device), batch(steps, device)
    with torch.no_grad():
        ends = [walk(act, place, noise)[1] for act in (agent, partial(functional_call, agent, params))]
    first, last = (end.abs().mean().item() for end in ends)
    assert last < first / 2, (first, last)
    metrics = history[-1]
    return {
        "distance_first": first,
        "distance_last": last,
        "skipped": metrics.skipped[-1].item(),
        "scale": metrics.scale[-1].item(),
    }


if __name__ == "__main__":
    print(main())
