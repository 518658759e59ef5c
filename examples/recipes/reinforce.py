"""REINFORCE: a program that acts and one that learns from many calls of the first.

    python examples/recipes/reinforce.py

Watch what goes between them: the actor gets the learner's weights (`compute_params`, again after every step),
and later calls do not change what a call returned, so eight transitions can be collected. Only the state is consumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

CONFIG, LR = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10), 0.1


def batch(index: int, device: str) -> tuple[Tensor, ...]:
    """Return walkers and goals on a line from -4 to 4, and uniform numbers to draw actions with."""
    generator = torch.Generator().manual_seed(index)
    places = torch.randint(-4, 5, (2, 32), generator=generator).float()
    return places[0].to(device), places[1].to(device), torch.rand(8, 32, generator=generator).to(device)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))


def criterion(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return (nn.functional.cross_entropy(logits.float(), target[0], reduction="none") * target[1]).mean()


def train(steps: int, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> tuple[Any, list[Any]]:
    """Return the parameters after some steps, and all metrics; aux is the mean distance from the goals."""
    model, sgd = make_model().to(device), funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    step = funcamp.make_train_step(funcamp.module_loss(model, criterion), sgd, CONFIG, policy="float16")

    def act(env: Any, batch: Any) -> Any:
        (position, goal), (params, uniform) = env, batch
        seen = torch.stack([position, goal], 1) / 4
        with torch.autocast(device, torch.float16):
            logits = functional_call(model, params, seen)
        action = (uniform < logits.float().softmax(1)[:, 1]).long()
        position = (position + 2 * action - 1).clamp(-4, 4)
        return (position, goal), (seen, action, -(position - goal).abs())

    def learn(state: funcamp.TrainState, rollout: list[Any]) -> Any:
        seen, action, reward = (torch.stack(column) for column in zip(*rollout))
        returns = reward.flip(0).cumsum(0).flip(0)
        advantage = returns - returns.mean(1, keepdim=True)
        state, metrics = step(state, (seen.flatten(0, 1), (action.flatten(), advantage.flatten())))
        return state, (metrics, -reward.mean())

    run_act, run_learn, state, history = wrap(act), wrap(learn), step.init(), []
    for index in range(steps):
        position, goal, uniform = batch(index, device)
        env, params, rollout = (position, goal), step.compute_params(state), []
        for numbers in uniform:
            env, transition = run_act(env, (params, numbers))
            rollout.append(transition)
        state, (metrics, distance) = run_learn(state, rollout)
        history.append(metrics._replace(aux=distance))
    return state.params.tree(), history


def main(steps: int = 100, wrap: Callable[[Any], Any] = funcamp.jit, device: str = "cpu") -> dict[str, float]:
    _, history = train(steps, wrap, device)
    first, last = history[0].aux.item(), torch.stack([metrics.aux for metrics in history[-10:]]).mean().item()
    assert last < first / 2, (first, last)
    return {"distance_first": first, "distance_last": last, "skipped": history[-1].skipped.item()}


if __name__ == "__main__":
    print(main())
