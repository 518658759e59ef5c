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
    Transition,
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


def autocast(like: Tensor, *, low: bool) -> torch.autocast:
    """bfloat16 where low, on a tensor's type of device."""
    return torch.autocast(like.device.type, torch.bfloat16, enabled=low)


def named(models: dict[str, nn.Module]) -> Values:
    """Copies of the parameters of several networks."""
    return {
        f"{name}.{part}": value.detach().clone()
        for name, model in models.items()
        for part, value in model.named_parameters()
    }


# torch's loop.


class Descent:
    """A step of torch's Adam on a loss, as users write it; with a GradScaler where low."""

    def __init__(
        self,
        size: Size,
        params: Iterable[Tensor],
        loss_fn: Callable[..., tuple[Tensor, Any]],
        *,
        low: bool,
        max_norm: float | None = None,
        fused: bool = True,
    ) -> None:
        self.params = list(params)
        self.loss_fn = loss_fn
        self.low = low
        self.max_norm = max_norm
        self.adam = torch.optim.Adam(self.params, fused=fused, foreach=not fused, **ADAM[size.learner])
        self.scaler = torch.amp.GradScaler(self.params[0].device.type, growth_interval=NEVER, enabled=low)

    def __call__(self, *inputs: Any) -> tuple[Tensor, Any]:
        """Take a step; return what the loss function does for these inputs, a loss and more."""
        self.adam.zero_grad()
        with autocast(self.params[0], low=self.low):
            loss, more = self.loss_fn(*inputs)
        self.scaler.scale(loss).backward(inputs=self.params)  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            self.scaler.unscale_(self.adam)
            nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.step(self.adam)
        self.scaler.update()
        return loss.detach(), more


class CompiledDescent(Descent):
    """The same in float32, compiled as two functions: loss, gradient and clipping; and the step.

    An update that is compiled as one function is slower: torch.compile leaves its graph at `zero_grad` and `backward`,
    and around the step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, fused=False)  # foreach: a kernel cannot be fused with others
        torch._dynamo.config.trace_autograd_ops = True
        self.differentiate = torch.compile(self._differentiate, fullgraph=True)
        self.step = torch.compile(lambda: self.adam.step())

    def __call__(self, *inputs: Any) -> tuple[Tensor, Any]:
        loss, more = self.differentiate(*inputs)
        self.step()
        return loss, more

    def _differentiate(self, *inputs: Any) -> tuple[Tensor, Any]:
        loss, more = self.loss_fn(*inputs)
        for param, grad in zip(self.params, torch.autograd.grad(loss, self.params)):
            param.grad = grad
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.max_norm)
        return loss.detach(), more


class Target:
    """A network that follows another one."""

    def __init__(self, model: nn.Module) -> None:
        self.network = copy.deepcopy(model).requires_grad_(False)
        self.params: list[Tensor] = list(self.network.parameters())
        self.followed: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def follow(self) -> None:
        """Move toward the other network."""
        torch._foreach_lerp_(self.params, self.followed, TAU)


def torch_ppo(size: Size, descent: type[Descent], *, low: bool) -> Learner:
    """Clipped by norm."""
    models = networks(size)
    agent = models["agent"]

    def loss_fn(batch: Any) -> tuple[Tensor, None]:
        observation, rollout = batch
        return ppo_loss(agent(observation), rollout), None

    descend = descent(size, agent.parameters(), loss_fn, low=low, max_norm=MAX_NORM)
    return Learner(descend, functools.partial(named, models))


def torch_dqn(size: Size, descent: type[Descent], *, low: bool) -> Learner:
    """With a target network."""
    models = networks(size)
    network = models["values"]
    target = Target(network)

    def loss_fn(batch: Any) -> tuple[Tensor, None]:
        with torch.no_grad():
            wanted = dqn_target(target.network, batch)
        return dqn_loss(network(batch.observation), (batch.action, wanted)), None

    descend = descent(size, network.parameters(), loss_fn, low=low)

    def update(batch: Any) -> Tensor:
        loss, _ = descend(batch)
        target.follow()
        return loss

    return Learner(update, functools.partial(named, models))


def torch_td3(size: Size, descent: type[Descent], *, low: bool) -> Learner:
    """Critics, actor, and the targets of both."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    target_actor, target_critics = Target(actor), Target(critics)

    def value_loss(transition: Transition, noise: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            wanted = td3_target(target_actor.network, target_critics.network, transition, noise)
        return critics_loss(critics(transition.observation, transition.action), wanted), None

    def policy_loss(observation: Tensor) -> tuple[Tensor, None]:
        return td3_actor_loss(actor(observation), critics, observation), None

    descend_critics = descent(size, critics.parameters(), value_loss, low=low)
    descend_actor = descent(size, actor.parameters(), policy_loss, low=low)

    def update(batch: Any) -> tuple[Tensor, Tensor]:
        transition, noise = batch
        of_values, _ = descend_critics(transition, noise)
        of_policy, _ = descend_actor(transition.observation)
        target_critics.follow()
        target_actor.follow()
        return of_values, of_policy

    return Learner(update, functools.partial(named, models))


def torch_sac(size: Size, descent: type[Descent], *, low: bool) -> Learner:
    """Critics, actor, temperature, and the critics' target."""
    models = networks(size)
    actor, critics = models["actor"], models["critics"]
    target_critics = Target(critics)
    log_temperature = torch.zeros((), requires_grad=True)

    def value_loss(transition: Transition, noise: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            wanted = sac_target(actor, target_critics.network, log_temperature.exp(), transition, noise)
        return critics_loss(critics(transition.observation, transition.action), wanted), None

    def policy_loss(observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        temperature = log_temperature.detach().exp()
        loss, log_prob = sac_actor_loss(actor(observation), critics, temperature, observation, noise)
        return loss, log_prob.detach()

    def alpha_loss(log_prob: Tensor) -> tuple[Tensor, None]:
        return temperature_loss(log_temperature, log_prob), None

    descend_critics = descent(size, critics.parameters(), value_loss, low=low)
    descend_actor = descent(size, actor.parameters(), policy_loss, low=low)
    descend_temperature = descent(size, [log_temperature], alpha_loss, low=False)

    def update(batch: Any) -> tuple[Tensor, Tensor]:
        transition, next_noise, noise = batch
        of_values, _ = descend_critics(transition, next_noise)
        of_policy, log_prob = descend_actor(transition.observation, noise)
        descend_temperature(log_prob)
        target_critics.follow()
        return of_values, of_policy

    return Learner(update, lambda: named(models) | {"log_temperature": log_temperature.detach().clone()})


TORCH = {"PPO": torch_ppo, "DQN": torch_dqn, "TD3": torch_td3, "SAC": torch_sac}


def torch_learner(size: Size, *, low: bool, compiled: bool = False) -> Learner:
    """A learner in torch's loop."""
    return TORCH[size.learner](size, CompiledDescent if compiled else Descent, low=low)


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
        with autocast(batch.observation, low=low):
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
        a_state, c_state = states
        transition, noise = batch
        observation = transition.observation
        with autocast(observation, low=low):
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
        a_state, c_state, t_state = states
        transition, next_noise, noise = batch
        observation = transition.observation
        temperature = t_state.params["log_temperature"].exp()
        with autocast(observation, low=low):
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
