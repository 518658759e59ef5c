"""An update of each learner of `_rl_learners`: torch's loop, eager or compiled, and a step of funcamp."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from _rl_learners import (
    ADAM,
    MAX_NORM,
    TAU,
    UPDATES,
    Network,
    Size,
    critics_loss,
    dqn_loss,
    dqn_target,
    networks,
    ppo_loss,
    sac_actor_loss,
    sac_target,
    td3_actor_loss,
    td3_target,
    temperature_loss,
)
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

Values = dict[str, Tensor]
NEVER = 10**6  # a growth interval: the scale stays, so that no update is skipped


class Learner(NamedTuple):
    """A learner in training."""

    update: Callable[[Any], Any]
    """Takes a minibatch, or as many as there are in one call."""
    values: Callable[[], Values]
    """Returns copies of the parameters by name."""


def autocast(*, low: bool) -> torch.autocast:
    """bfloat16 where low."""
    return torch.autocast("cpu", torch.bfloat16, enabled=low)


def named(models: dict[str, nn.Module]) -> Values:
    """Copies of the parameters of several networks."""
    return {
        f"{name}.{part}": value.detach().clone()
        for name, model in models.items()
        for part, value in model.named_parameters()
    }


# torch's loop.


class Descent:
    """A step of Adam from a loss."""

    def __init__(self, size: Size, params: Iterable[Tensor], *, low: bool, max_norm: float | None = None) -> None:
        self.params, self.max_norm = list(params), max_norm
        self.adam = torch.optim.Adam(self.params, fused=True, **ADAM[size.learner])
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=NEVER, enabled=low)

    def __call__(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        self.scaler.scale(loss).backward(inputs=self.params)  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            self.scaler.unscale_(self.adam)
            nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.step(self.adam)
        self.scaler.update()


@torch.no_grad()
def follow(target: nn.Module, model: nn.Module) -> None:
    """Move a target network toward a network."""
    for old, new in zip(target.parameters(), model.parameters()):
        old.lerp_(new, TAU)


def torch_ppo(size: Size, *, low: bool) -> Learner:
    """Clipped by norm."""
    models = networks(size)
    agent = models["agent"]
    descend = Descent(size, agent.parameters(), low=low, max_norm=MAX_NORM)

    def update(batch: Any) -> Tensor:
        observation, rollout = batch
        with autocast(low=low):
            loss = ppo_loss(agent(observation), rollout)
        descend(loss)
        return loss.detach()

    return Learner(update, functools.partial(named, models))


def torch_dqn(size: Size, *, low: bool) -> Learner:
    """With a target network."""
    models = networks(size)
    network = models["values"]
    target_network, descend = copy.deepcopy(network), Descent(size, network.parameters(), low=low)

    def update(batch: Any) -> Tensor:
        with autocast(low=low):
            with torch.no_grad():
                target = dqn_target(target_network, batch)
            loss = dqn_loss(network(batch.observation), (batch.action, target))
        descend(loss)
        follow(target_network, network)
        return loss.detach()

    return Learner(update, functools.partial(named, models))


def torch_td3(size: Size, *, low: bool) -> Learner:
    """Critics, actor, and the targets of both."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    target_actor, target_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    descend_actor = Descent(size, actor.parameters(), low=low)
    descend_critics = Descent(size, critics.parameters(), low=low)

    def update(batch: Any) -> tuple[Tensor, Tensor]:
        transition, noise = batch
        observation = transition.observation
        with autocast(low=low):
            with torch.no_grad():
                target = td3_target(target_actor, target_critics, transition, noise)
            value_loss = critics_loss(critics(observation, transition.action), target)
        descend_critics(value_loss)
        with autocast(low=low):
            policy_loss = td3_actor_loss(actor(observation), critics, observation)
        descend_actor(policy_loss)
        follow(target_critics, critics)
        follow(target_actor, actor)
        return value_loss.detach(), policy_loss.detach()

    return Learner(update, functools.partial(named, models))


def torch_sac(size: Size, *, low: bool) -> Learner:
    """Critics, actor, temperature, and the critics' target."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    target_critics, log_temperature = copy.deepcopy(critics), torch.zeros((), requires_grad=True)
    descend_actor = Descent(size, actor.parameters(), low=low)
    descend_critics = Descent(size, critics.parameters(), low=low)
    descend_temperature = Descent(size, [log_temperature], low=False)

    def update(batch: Any) -> tuple[Tensor, Tensor]:
        transition, next_noise, noise = batch
        observation, temperature = transition.observation, log_temperature.detach().exp()
        with autocast(low=low):
            with torch.no_grad():
                target = sac_target(actor, target_critics, temperature, transition, next_noise)
            value_loss = critics_loss(critics(observation, transition.action), target)
        descend_critics(value_loss)
        with autocast(low=low):
            policy_loss, log_prob = sac_actor_loss(actor(observation), critics, temperature, observation, noise)
        descend_actor(policy_loss)
        descend_temperature(temperature_loss(log_temperature, log_prob))
        follow(target_critics, critics)
        return value_loss.detach(), policy_loss.detach()

    return Learner(update, lambda: named(models) | {"log_temperature": log_temperature.detach().clone()})


TORCH = {"PPO": torch_ppo, "DQN": torch_dqn, "TD3": torch_td3, "SAC": torch_sac}


def torch_learner(size: Size, *, low: bool, compiled: bool = False) -> Learner:
    """A learner in torch's loop, with a GradScaler where low; the whole update compiled if asked for."""
    learner = TORCH[size.learner](size, low=low)
    if not compiled:
        return learner
    run = torch.compile(learner.update)

    def update(batch: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return run(batch)

    return learner._replace(update=update)


# funcamp.


class Step(NamedTuple):
    """What `funcamp.jit` takes, its first state, and where the parameters are in one."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    values: Callable[[Any], dict[str, Values]]


def adam(size: Size) -> Any:
    """Adam as a function."""
    return funcamp.stateless(torch.optim.Adam, **ADAM[size.learner])


def train_step(loss_fn: Any, optimizer: Any, *, low: bool) -> funcamp.TrainStep:
    """A step in float32 without a scale, or in bfloat16 with one."""
    if not low:
        return funcamp.make_train_step(loss_fn, optimizer, funcamp.presets.disabled())
    return funcamp.make_train_step(loss_fn, optimizer, funcamp.ScalerConfig(growth_interval=NEVER), policy="bfloat16")


def with_params(model: nn.Module, params: Values) -> Network:
    """A network with these parameters."""
    return lambda *inputs, **options: functional_call(model, params, inputs, options)


def target_params(step: funcamp.TrainStep, state: funcamp.TrainState) -> Any:
    """The average of the parameters, as a loss gets it."""
    return step.compute_params(state._replace(params=state.ema))


def ppo_step(size: Size, *, low: bool) -> Step:
    """Clipped by norm."""
    agent = networks(size)["agent"]
    optimizer = funcamp.chain(funcamp.clip_by_norm(MAX_NORM), adam(size))
    step = train_step(funcamp.module_loss(agent, ppo_loss), optimizer, low=low)
    return Step(step, step.init(), lambda state: {"agent": state.params.tree()})


def dqn_step(size: Size, *, low: bool) -> Step:
    """With a target network."""
    network = networks(size)["values"]
    optimizer = funcamp.chain(adam(size), funcamp.average(1 - TAU))
    q_step = train_step(funcamp.module_loss(network, dqn_loss), optimizer, low=low)

    def step(state: funcamp.TrainState, batch: Any) -> tuple[funcamp.TrainState, Any]:
        with autocast(low=low):
            target = dqn_target(with_params(network, target_params(q_step, state)), batch)
        return q_step(state, (batch.observation, (batch.action, target)))

    return Step(step, q_step.init(), lambda state: {"values": state.params.tree()})


def td3_step(size: Size, *, low: bool) -> Step:
    """Critics, actor, and the targets of both."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    with_target = funcamp.chain(adam(size), funcamp.average(1 - TAU))

    def actor_loss(action: Tensor, given: tuple[Tensor, Values]) -> Tensor:
        observation, params = given
        return td3_actor_loss(action, with_params(critics, params), observation)

    a_step = train_step(funcamp.module_loss(actor, actor_loss), with_target, low=low)
    c_step = train_step(funcamp.module_loss(critics, critics_loss), with_target, low=low)

    def step(states: Any, batch: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
        (a_state, c_state), (transition, noise) = states, batch
        observation = transition.observation
        with autocast(low=low):
            target_actor = with_params(actor, target_params(a_step, a_state))
            target_critics = with_params(critics, target_params(c_step, c_state))
            target = td3_target(target_actor, target_critics, transition, noise)
        c_state, c_row = c_step(c_state, (observation, transition.action, target))
        a_state, a_row = a_step(a_state, (observation, (observation, c_step.compute_params(c_state))))
        return (a_state, c_state), (c_row.loss, a_row.loss)

    def values(states: Any) -> dict[str, Values]:
        return {name: state.params.tree() for name, state in zip(("actor", "critics"), states)}

    return Step(step, (a_step.init(), c_step.init()), values)


def sac_step(size: Size, *, low: bool) -> Step:
    """Critics, actor, temperature, and the critics' target."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    with_target = funcamp.chain(adam(size), funcamp.average(1 - TAU))

    def actor_loss(output: Tensor, given: tuple[Tensor, Tensor, Tensor, Values]) -> tuple[Tensor, Tensor]:
        temperature, observation, noise, params = given
        return sac_actor_loss(output, with_params(critics, params), temperature, observation, noise)

    def alpha_loss(params: Values, log_prob: Tensor) -> Tensor:
        return temperature_loss(params["log_temperature"], log_prob)

    a_step = train_step(funcamp.module_loss(actor, actor_loss, has_aux=True), adam(size), low=low)
    c_step = train_step(funcamp.module_loss(critics, critics_loss), with_target, low=low)
    t_step = train_step(alpha_loss, adam(size), low=False)

    def step(states: Any, batch: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
        (a_state, c_state, t_state), (transition, next_noise, noise) = states, batch
        observation, temperature = transition.observation, t_state.params["log_temperature"].exp()
        with autocast(low=low):
            policy = with_params(actor, a_step.compute_params(a_state))
            target_critics = with_params(critics, target_params(c_step, c_state))
            target = sac_target(policy, target_critics, temperature, transition, next_noise)
        c_state, c_row = c_step(c_state, (observation, transition.action, target))
        given = temperature, observation, noise, c_step.compute_params(c_state)
        a_state, a_row = a_step(a_state, (observation, given))
        t_state, _ = t_step(t_state, a_row.aux)
        return (a_state, c_state, t_state), (c_row.loss, a_row.loss)

    def values(states: Any) -> dict[str, Values]:
        a_state, c_state, t_state = states
        return {"actor": a_state.params.tree(), "critics": c_state.params.tree(), "": t_state.params.tree()}

    return Step(step, (a_step.init(), c_step.init(), t_step.init({"log_temperature": torch.zeros(())})), values)


STEPS = {"PPO": ppo_step, "DQN": dqn_step, "TD3": td3_step, "SAC": sac_step}


def funcamp_learner(size: Size, *, low: bool, at_once: bool = False, **options: Any) -> Learner:
    """A learner by `funcamp.jit` with these options, with a scaler where low; at_once: all updates in one call."""
    step, state, values_of = STEPS[size.learner](size, low=low)
    run = funcamp.jit(step, unroll=UPDATES if at_once else None, **options)

    def update(batch: Any) -> Any:
        nonlocal state
        state, metrics = run(state, batch)
        return metrics

    def values() -> Values:
        return {
            f"{name}.{part}".lstrip("."): value.detach().clone()
            for name, tree in values_of(state).items()
            for part, value in tree.items()
        }

    return Learner(update, values)
