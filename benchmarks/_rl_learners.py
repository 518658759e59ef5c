"""The learners that `rl.py` measures: sizes, networks, minibatches, and losses as functions of what networks return.

The updates are those of CleanRL; DQN has the loss of Huber, and every target network follows at each update.
A minibatch has its noise, so that all variants compute with the same numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.utils import _pytree

UPDATES = 32
"""Minibatches of a sweep."""
# Dimensions of HalfCheetah, for PPO, TD3 and SAC.
OBSERVATION = 17
ACTION = 6
# Those of CartPole, for DQN.
CARTPOLE_OBSERVATION = 4
CARTPOLE_ACTIONS = 2
# Of PPO's loss, and of its gradient.
CLIP = 0.2
ENTROPY = 0.01
VALUE = 0.5
MAX_NORM = 0.5
# Of the learners from transitions.
DISCOUNT = 0.99
TAU = 0.005
# Of TD3's target policy.
NOISE = 0.2
LARGEST_NOISE = 0.5
# Of SAC's policy.
LOG_STD_MIN = -5.0
LOG_STD_MAX = 2.0
TARGET_ENTROPY = -float(ACTION)
LOG_2_PI = math.log(2 * math.pi)

ADAM: dict[str, dict[str, Any]] = {
    "PPO": {"lr": 3e-4, "eps": 1e-5},
    "DQN": {"lr": 2.5e-4, "eps": 1e-8},
    "TD3": {"lr": 3e-4, "eps": 1e-8},
    "SAC": {"lr": 3e-4, "eps": 1e-8},
}
"""Options of every optimizer of a learner."""

Network = Callable[..., Tensor]


class Size(NamedTuple):
    """A learner and its numbers."""

    learner: str
    widths: tuple[int, int]
    batch: int
    sweeps: int
    """In one timing, so that it takes 50 ms or more."""


SIZES = {
    "PPO 64, batch 64": Size("PPO", (64, 64), 64, 20),
    "PPO 64, batch 256": Size("PPO", (64, 64), 256, 12),
    "PPO 256, batch 64": Size("PPO", (256, 256), 64, 6),
    "PPO 256, batch 256": Size("PPO", (256, 256), 256, 4),
    "DQN": Size("DQN", (120, 84), 128, 24),
    "TD3": Size("TD3", (256, 256), 256, 2),
    "SAC": Size("SAC", (256, 256), 256, 2),
}


class Rollout(NamedTuple):
    """What PPO's loss compares with, of every observation: the values when the policy acted."""

    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    returns: Tensor
    value: Tensor


class Transition(NamedTuple):
    """Rows of a replay buffer."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    done: Tensor


def mlp(inputs: int, widths: tuple[int, ...], outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((inputs, *widths, outputs)):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """PPO's actor and critic: the mean of an action, the logarithm of its standard deviation, and a value."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.actor = mlp(OBSERVATION, widths, ACTION, nn.Tanh)
        self.critic = mlp(OBSERVATION, widths, 1, nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(ACTION))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.actor(observation), self.log_std, self.critic(observation)[:, 0]


class Critics(nn.Module):
    """Two values of an action, or only the first."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.both = nn.ModuleList(mlp(OBSERVATION + ACTION, widths, 1, nn.ReLU) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor, count: int = 2) -> Tensor:
        inputs = torch.cat([observation, action], 1)
        return torch.cat([critic(inputs) for critic, _ in zip(self.both, range(count))], 1)


def networks(size: Size) -> dict[str, Any]:
    """The networks of a learner by name, always with the same weights, on torch's default device."""
    with torch.device("cpu"):
        found = _networks(size)
    return {name: network.to(torch.get_default_device()) for name, network in found.items()}


def _networks(size: Size) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    if size.learner == "PPO":
        return {"agent": Agent(size.widths)}
    if size.learner == "DQN":
        return {"values": mlp(CARTPOLE_OBSERVATION, size.widths, CARTPOLE_ACTIONS, nn.ReLU)}
    if size.learner == "TD3":
        actor = mlp(OBSERVATION, size.widths, ACTION, nn.ReLU)
        return {"actor": actor.append(nn.Tanh()), "critics": Critics(size.widths)}
    return {"actor": mlp(OBSERVATION, size.widths, 2 * ACTION, nn.ReLU), "critics": Critics(size.widths)}


def minibatches(size: Size) -> list[Any]:
    """The minibatches of a sweep, always the same."""
    make = {"PPO": _rollout, "DQN": _cartpole, "TD3": _noisy(1), "SAC": _noisy(2)}[size.learner]
    generator = torch.Generator().manual_seed(1)
    return [make(size, functools.partial(torch.randn, generator=generator)) for _ in range(UPDATES)]


def stacked(batches: list[Any]) -> Any:
    """Minibatches as one, along a first dimension."""
    return _pytree.tree_map(lambda *leaves: torch.stack(leaves), *batches)


@torch.no_grad()
def _rollout(size: Size, randn: Network) -> tuple[Tensor, Rollout]:
    observation = randn(size.batch, OBSERVATION)
    noise = randn(size.batch, ACTION)
    rest = randn(4, size.batch)
    mean, log_std, value = networks(size)["agent"](observation)
    action = mean + log_std.exp() * noise
    log_prob = normal_log_prob(mean, log_std, action) + 0.1 * rest[0]
    return observation, Rollout(action, log_prob, rest[1], value + rest[2], value + 0.1 * rest[3])


def _cartpole(size: Size, randn: Network) -> Transition:
    observation, next_observation = randn(2, size.batch, CARTPOLE_OBSERVATION)
    action = (randn(size.batch) > 0).long()
    done = (randn(size.batch) > 2).float()
    return Transition(observation, action, randn(size.batch), next_observation, done)


def _noisy(count: int) -> Callable[[Size, Network], tuple[Any, ...]]:
    """Transitions, and as many draws of noise for policies."""

    def make(size: Size, randn: Network) -> tuple[Any, ...]:
        observation, next_observation = randn(2, size.batch, OBSERVATION)
        action = randn(size.batch, ACTION).tanh()
        done = (randn(size.batch) > 2).float()
        transition = Transition(observation, action, randn(size.batch), next_observation, done)
        return transition, *randn(count, size.batch, ACTION)

    return make


# Losses. What networks return may be in low precision; the rest is in float32.


def normal_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Logarithms of the densities of actions."""
    return (-(((action - mean) / log_std.exp()) ** 2) / 2 - log_std - LOG_2_PI / 2).sum(-1)


def ppo_loss(output: tuple[Tensor, Tensor, Tensor], rollout: Rollout) -> Tensor:
    """The clipped surrogate, the clipped error of the value, and the entropy."""
    mean, log_std, value = (part.float() for part in output)
    ratio = (normal_log_prob(mean, log_std, rollout.action) - rollout.log_prob).exp()
    advantage = (rollout.advantage - rollout.advantage.mean()) / (rollout.advantage.std() + 1e-8)
    surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    near = rollout.value + (value - rollout.value).clamp(-CLIP, CLIP)
    error = torch.maximum((value - rollout.returns) ** 2, (near - rollout.returns) ** 2).mean() / 2
    entropy = (log_std + (1 + LOG_2_PI) / 2).sum()
    return VALUE * error - surrogate - ENTROPY * entropy


def bootstrapped(transition: Transition, next_value: Tensor) -> Tensor:
    """The rewards, with the discounted values of what follows."""
    return transition.reward + DISCOUNT * (1 - transition.done) * next_value.float()


def dqn_target(network: Network, transition: Transition) -> Tensor:
    """What the value of an action should be."""
    return bootstrapped(transition, network(transition.next_observation).amax(1))


def dqn_loss(values: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    """Huber's loss of the values of actions."""
    action, target = given
    return smooth_l1_loss(values.gather(1, action[:, None])[:, 0].float(), target)


def critics_loss(values: Tensor, target: Tensor) -> Tensor:
    """The squared errors of both critics."""
    return (values.float() - target[:, None]).square().mean(0).sum()


def td3_target(actor: Network, critics: Network, transition: Transition, noise: Tensor) -> Tensor:
    """What both critics should return: the smaller value of an action near the policy's."""
    near = actor(transition.next_observation) + (NOISE * noise).clamp(-LARGEST_NOISE, LARGEST_NOISE)
    return bootstrapped(transition, critics(transition.next_observation, near.clamp(-1, 1)).amin(1))


def td3_actor_loss(action: Tensor, critics: Network, observation: Tensor) -> Tensor:
    """Minus the first critic's value."""
    return -critics(observation, action, count=1).float().mean()


def drawn(output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions from -1 to 1, and the logarithms of their densities."""
    mean, free = output.float().chunk(2, 1)
    log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (free.tanh() + 1)
    action = (mean + log_std.exp() * noise).tanh()
    log_prob = -noise.square() / 2 - log_std - LOG_2_PI / 2 - (1 - action.square() + 1e-6).log()
    return action, log_prob.sum(1)


def sac_target(actor: Network, critics: Network, temperature: Tensor, transition: Transition, noise: Tensor) -> Tensor:
    """What both critics should return: the smaller value of an action of the policy, and its entropy."""
    action, log_prob = drawn(actor(transition.next_observation), noise)
    value = critics(transition.next_observation, action).amin(1).float()
    return bootstrapped(transition, value - temperature * log_prob)


def sac_actor_loss(
    output: Tensor, critics: Network, temperature: Tensor, observation: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The smaller value and the entropy of an action of the policy; also the logarithm of its density."""
    action, log_prob = drawn(output, noise)
    return (temperature * log_prob - critics(observation, action).amin(1).float()).mean(), log_prob


def temperature_loss(log_temperature: Tensor, log_prob: Tensor) -> Tensor:
    """What leads the policy's entropy to its target."""
    return -(log_temperature.exp() * (log_prob + TARGET_ENTROPY)).mean()
