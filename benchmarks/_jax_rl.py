"""The learners of `_rl_learners` in JAX: one jitted update with donation, optax, and in bfloat16 jmp's dynamic scale.

Written as JAX users would: parameters in float32, products in bfloat16 where low, the rest in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
import torch
from _jax_peer import adjusted, as_array
from _rl_learners import (
    ACTION,
    ADAM,
    CLIP,
    DISCOUNT,
    ENTROPY,
    LARGEST_NOISE,
    LOG_2_PI,
    LOG_STD_MAX,
    LOG_STD_MIN,
    MAX_NORM,
    NOISE,
    TARGET_ENTROPY,
    TAU,
    VALUE,
    Rollout,
    Size,
    Transition,
    networks,
)
from _rl_updates import Learner
from torch.utils import _pytree

Array: TypeAlias = Any
Layers: TypeAlias = list[tuple[Array, Array]]
"""Of every linear layer a matrix (inputs, outputs) and a bias."""
Network = Callable[..., Array]


def layers_of(model: torch.nn.Module) -> Layers:
    """The linear layers of a network of torch."""
    return [
        (as_array(part.weight.T.contiguous()), as_array(part.bias))
        for part in model.modules()
        if isinstance(part, torch.nn.Linear)
    ]


def mlp(layers: Layers, x: Array, activation: Network, low: Any) -> Array:
    """The last layer's result, in low precision."""
    x = x.astype(low)
    for index, (weight, bias) in enumerate(layers):
        x = x @ weight.astype(low) + bias.astype(low)
        if index < len(layers) - 1:
            x = activation(x)
    return x


# An optimizer and its state.


class State(NamedTuple):
    """Parameters, what optax remembers, and in bfloat16 a scale with a count."""

    params: Any
    opt_state: Any
    scale: tuple[Array, ...]


class Descent(NamedTuple):
    """A step of an optimizer from a loss; in low precision scaled, and skipped if a gradient is not finite."""

    rule: optax.GradientTransformation
    low: bool

    def init(self, params: Any) -> State:
        scale = (jnp.float32(2.0**16), jnp.int32(0)) if self.low else ()
        return State(params, self.rule.init(params), scale)

    def __call__(self, state: State, loss_fn: Callable[[Any], tuple[Array, Any]]) -> tuple[State, Any]:
        """The new state, and what the loss returned."""
        if not self.low:
            grads, returned = jax.grad(lambda params: both(loss_fn(params)), has_aux=True)(state.params)
            updates, opt_state = self.rule.update(grads, state.opt_state, state.params)
            return State(optax.apply_updates(state.params, updates), opt_state, ()), returned
        scale = state.scale[0]
        grads, returned = jax.grad(lambda params: both(loss_fn(params), scale), has_aux=True)(state.params)
        grads = jax.tree.map(lambda grad: grad / scale, grads)
        finite = jnp.stack([jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]).all()
        updates, opt_state = self.rule.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jax.lax.select(finite, a, b), new, state[:2])
        return State(params, opt_state, adjusted(state.scale, finite)), returned


def both(returned: tuple[Array, Any], scale: Array = 1.0) -> tuple[Array, Any]:
    """The scaled loss, and what there was."""
    return returned[0] * scale, returned


def adam(size: Size) -> optax.GradientTransformation:
    """Adam."""
    options = ADAM[size.learner]
    return optax.adam(options["lr"], eps=options["eps"])


# PPO.


def normal_log_prob(mean: Array, log_std: Array, action: Array) -> Array:
    """Logarithms of the densities of actions."""
    return (-(((action - mean) / jnp.exp(log_std)) ** 2) / 2 - log_std - LOG_2_PI / 2).sum(-1)


def ppo_loss(mean: Array, log_std: Array, value: Array, rollout: Rollout) -> Array:
    """The clipped surrogate, the clipped error of the value, and the entropy."""
    given: Any = rollout
    ratio = jnp.exp(normal_log_prob(mean, log_std, given.action) - given.log_prob)
    advantage = (given.advantage - given.advantage.mean()) / (given.advantage.std(ddof=1) + 1e-8)
    surrogate = jnp.minimum(advantage * ratio, advantage * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)).mean()
    near = given.value + jnp.clip(value - given.value, -CLIP, CLIP)
    error = jnp.maximum((value - given.returns) ** 2, (near - given.returns) ** 2).mean() / 2
    entropy = (log_std + (1 + LOG_2_PI) / 2).sum()
    return VALUE * error - surrogate - ENTROPY * entropy


Update = Callable[[Any, Any], tuple[Any, Any]]


def ppo(size: Size, low: Any, descend: Callable[..., Descent]) -> tuple[Any, Update]:
    """The first state, and a function (state, minibatch) -> (state, loss)."""
    agent = networks(size)["agent"]
    params = {"actor": layers_of(agent.actor), "critic": layers_of(agent.critic), "log_std": as_array(agent.log_std)}
    rule = descend(optax.chain(optax.clip_by_global_norm(MAX_NORM), adam(size)))

    def update(state: State, batch: Any) -> tuple[State, Array]:
        observation, rollout = batch

        def loss_fn(params: Any) -> tuple[Array, None]:
            mean = mlp(params["actor"], observation, jnp.tanh, low).astype(jnp.float32)
            value = mlp(params["critic"], observation, jnp.tanh, low)[:, 0].astype(jnp.float32)
            return ppo_loss(mean, params["log_std"], value, rollout), None

        state, (loss, _) = rule(state, loss_fn)
        return state, loss

    return rule.init(params), update


# DQN, TD3 and SAC.


def bootstrapped(transition: Transition, next_value: Array) -> Array:
    """The rewards, with the discounted values of what follows."""
    given: Any = transition
    return given.reward + DISCOUNT * (1 - given.done) * next_value.astype(jnp.float32)


def critics(params: list[Layers], observation: Array, action: Array, low: Any) -> Array:
    """The values of several critics, of shape (batch, critics), in float32."""
    inputs = jnp.concatenate([observation, action], 1)
    values = [mlp(layers, inputs, jax.nn.relu, low) for layers in params]
    return jnp.concatenate(values, 1).astype(jnp.float32)


def critics_loss(values: Array, target: Array) -> Array:
    """The squared errors of both critics."""
    return jnp.square(values - target[:, None]).mean(0).sum()


def dqn(size: Size, low: Any, descend: Callable[..., Descent]) -> tuple[Any, Update]:
    """With a target network."""
    params = layers_of(networks(size)["values"])
    rule = descend(adam(size))

    def update(states: Any, batch: Any) -> tuple[Any, Array]:
        state, target_params = states
        target = bootstrapped(batch, mlp(target_params, batch.next_observation, jax.nn.relu, low).max(1))

        def loss_fn(params: Layers) -> tuple[Array, None]:
            values = mlp(params, batch.observation, jax.nn.relu, low)
            chosen = jnp.take_along_axis(values, batch.action[:, None], 1)[:, 0].astype(jnp.float32)
            return optax.huber_loss(chosen, target).mean(), None

        state, (loss, _) = rule(state, loss_fn)
        return (state, optax.incremental_update(state.params, target_params, TAU)), loss

    return (rule.init(params), copied(params)), update


def td3(size: Size, low: Any, descend: Callable[..., Descent]) -> tuple[Any, Update]:
    """Critics, actor, and the targets of both."""
    models = networks(size)
    first = {"actor": layers_of(models["actor"]), "critics": [layers_of(critic) for critic in models["critics"].both]}
    rule = descend(adam(size))

    def act(params: Layers, observation: Array) -> Array:
        return jnp.tanh(mlp(params, observation, jax.nn.relu, low))

    def update(states: Any, batch: Any) -> tuple[Any, tuple[Array, Array]]:
        actor, both_critics, targets = states
        transition, noise = batch
        observation = transition.observation
        near = act(targets["actor"], transition.next_observation)
        near = jnp.clip(near + jnp.clip(NOISE * noise, -LARGEST_NOISE, LARGEST_NOISE), -1, 1)
        next_values = critics(targets["critics"], transition.next_observation, near, low)
        target = bootstrapped(transition, next_values.min(1))

        def value_loss(params: list[Layers]) -> tuple[Array, None]:
            return critics_loss(critics(params, observation, transition.action, low), target), None

        both_critics, (first_loss, _) = rule(both_critics, value_loss)

        def policy_loss(params: Layers) -> tuple[Array, None]:
            return -critics(both_critics.params[:1], observation, act(params, observation), low).mean(), None

        actor, (second_loss, _) = rule(actor, policy_loss)
        params = {"actor": actor.params, "critics": both_critics.params}
        return (actor, both_critics, optax.incremental_update(params, targets, TAU)), (first_loss, second_loss)

    return (rule.init(first["actor"]), rule.init(first["critics"]), copied(first)), update


def drawn(output: Array, noise: Array) -> tuple[Array, Array]:
    """Actions from -1 to 1, and the logarithms of their densities."""
    mean, free = jnp.split(output.astype(jnp.float32), [ACTION], 1)
    log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (jnp.tanh(free) + 1)
    action = jnp.tanh(mean + jnp.exp(log_std) * noise)
    log_prob = -jnp.square(noise) / 2 - log_std - LOG_2_PI / 2 - jnp.log(1 - jnp.square(action) + 1e-6)
    return action, log_prob.sum(1)


def sac(size: Size, low: Any, descend: Callable[..., Descent]) -> tuple[Any, Update]:
    """Critics, actor, temperature, and the critics' target."""
    models = networks(size)
    first = [layers_of(critic) for critic in models["critics"].both]
    rule = descend(adam(size))
    temperature_rule = Descent(adam(size), low=False)

    def act(params: Layers, observation: Array, noise: Array) -> tuple[Array, Array]:
        return drawn(mlp(params, observation, jax.nn.relu, low), noise)

    def update(states: Any, batch: Any) -> tuple[Any, tuple[Array, Array]]:
        actor, both_critics, log_temperature, target_critics = states
        transition, next_noise, noise = batch
        observation = transition.observation
        temperature = jnp.exp(log_temperature.params)
        next_action, log_prob = act(actor.params, transition.next_observation, next_noise)
        next_values = critics(target_critics, transition.next_observation, next_action, low)
        target = bootstrapped(transition, next_values.min(1) - temperature * log_prob)

        def value_loss(params: list[Layers]) -> tuple[Array, None]:
            return critics_loss(critics(params, observation, transition.action, low), target), None

        both_critics, (first_loss, _) = rule(both_critics, value_loss)

        def policy_loss(params: Layers) -> tuple[Array, Array]:
            action, log_prob = act(params, observation, noise)
            value = critics(both_critics.params, observation, action, low).min(1)
            return (temperature * log_prob - value).mean(), log_prob

        actor, (second_loss, log_prob) = rule(actor, policy_loss)

        def temperature_loss(log_temperature: Array) -> tuple[Array, None]:
            return -(jnp.exp(log_temperature) * (log_prob + TARGET_ENTROPY)).mean(), None

        log_temperature, _ = temperature_rule(log_temperature, temperature_loss)
        target_critics = optax.incremental_update(both_critics.params, target_critics, TAU)
        return (actor, both_critics, log_temperature, target_critics), (first_loss, second_loss)

    states = rule.init(layers_of(models["actor"])), rule.init(first), temperature_rule.init(jnp.float32(0))
    return (*states, copied(first)), update


def copied(params: Any) -> Any:
    """Arrays of their own, which may be donated too."""
    return jax.tree.map(jnp.copy, params)


# What is timed.


def named(name: str, layers: Layers) -> dict[str, torch.Tensor]:
    """The parameters of a sequence of layers, as torch names them."""
    values = {}
    for index, (weight, bias) in enumerate(layers):
        values[f"{name}.{2 * index}.weight"] = torch.tensor(jax.device_get(weight)).T
        values[f"{name}.{2 * index}.bias"] = torch.tensor(jax.device_get(bias))
    return values


def values_of(size: Size, state: Any) -> dict[str, torch.Tensor]:
    """The parameters in a state, as torch names them."""
    if size.learner == "PPO":
        params = state.params
        values = named("agent.actor", params["actor"]) | named("agent.critic", params["critic"])
        return values | {"agent.log_std": torch.tensor(jax.device_get(params["log_std"]))}
    if size.learner == "DQN":
        return named("values", state[0].params)
    values = named("actor", state[0].params)
    for index, layers in enumerate(state[1].params):
        values |= named(f"critics.both.{index}", layers)
    if size.learner == "SAC":
        values["log_temperature"] = torch.tensor(jax.device_get(state[2].params))
    return values


LEARNERS = {"PPO": ppo, "DQN": dqn, "TD3": td3, "SAC": sac}


def arrays(batch: Any) -> Any:
    """A minibatch as arrays."""
    return _pytree.tree_map(as_array, batch)


def learner(size: Size, *, low: bool, at_once: bool = False) -> tuple[Learner, Callable[[], None]]:
    """A learner, all updates in one call of `lax.scan` if at_once; and what waits for the updates that were begun."""
    dtype = jnp.bfloat16 if low else jnp.float32
    state, one = LEARNERS[size.learner](size, dtype, functools.partial(Descent, low=low))
    run = jax.jit(functools.partial(jax.lax.scan, one) if at_once else one, donate_argnums=0)

    def update(batch: Any) -> Any:
        nonlocal state
        state, losses = run(state, batch)
        return losses

    def wait() -> None:
        jax.block_until_ready(state)

    return Learner(update, lambda: values_of(size, state)), wait
