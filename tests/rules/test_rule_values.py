"""The claim: a rule is a value, and a rule of your own works wherever a library's does."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import funcamp
from funcamp import GradScaler, ScalerConfig, ScalerState, exhausted, init, presets, rules, update
from funcamp._scaler.state import RuleState
from funcamp.rules.arithmetic import HysteresisRule
from funcamp.rules.deepspeed import DeepSpeed
from funcamp.rules.megatron import Megatron
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import flagged
from tests.support.rules import RULES


@dataclass(frozen=True)
class Gradual(rules.Rule):
    """Grow at every clean step, but rest after an overflow: its counter has the steps of rest that are left."""

    rest: int = 2

    def first_counters(self) -> dict[str, int]:
        return {"rest_left": 0}

    def outcome(self, state: ScalerState, config: ScalerConfig) -> rules.Outcome:
        assert isinstance(state, RuleState)
        overflow = state.found_inf != 0
        rest_left = state.counters["rest_left"]
        grows = ~overflow & (rest_left == 0)
        lower = state.scale * config.backoff_factor
        higher = state.scale * config.growth_factor
        return rules.Outcome(
            scale=torch.where(overflow, lower, torch.where(grows, higher, state.scale)),
            growth_tracker=state.growth_tracker,
            backs_off=overflow,
            grows=grows,
            counters={"rest_left": torch.where(overflow, self.rest, (rest_left - 1).clamp(min=0))},
        )

    def check(self, config: ScalerConfig) -> None:
        super().check(config)
        if config.max_scale is None:
            raise ValueError("Gradual: max_scale must be given")


OWN = ScalerConfig(8.0, max_scale=64.0, rule=Gradual())
FLAGS = (False, True, False, False, False, False, False, False)
SCALES = (16.0, 8.0, 8.0, 8.0, 16.0, 32.0, 64.0, 64.0)


def test_every_rule_of_the_package_is_in_the_tests() -> None:
    def below(kind: Any) -> set[Any]:
        return {kind}.union(*(below(other) for other in kind.__subclasses__()))

    ours = {kind for kind in below(rules.Rule) if kind.__module__.startswith("funcamp.")}
    assert ours - {type(rule) for rule in RULES.values()} == {rules.Rule, HysteresisRule}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_a_value(rule: rules.Rule) -> None:
    config = ScalerConfig(rule=rule)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert other == config
        assert hash(other) == hash(config)
    assert eval(repr(rule), {rule.name: type(rule)}) == rule
    assert [other for other in RULES.values() if other == rule] == [rule]


def test_rules_with_other_parameters_differ() -> None:
    assert Megatron() != Megatron(hysteresis=2)
    assert presets.megatron(hysteresis=2) != presets.megatron(hysteresis=3)
    assert presets.deepspeed() != presets.deepspeed(consecutive_hysteresis=True)
    assert presets.paddle_dygraph() != replace(presets.paddle(), min_scale=None)
    assert DeepSpeed(2).name == "DeepSpeed"


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_config_is_a_constant_of_a_compiled_function(rule: rules.Rule) -> None:
    config = ScalerConfig(64.0, growth_interval=2, rule=rule)

    @torch.compile(fullgraph=True, backend="eager")
    def move(state: ScalerState, config: ScalerConfig) -> ScalerState:
        return update(state, config)

    state = flagged(init(config), True)
    assert_same(move(state, config), update(state, config))
    other = replace(config, min_scale=64.0)  # not the constant of before
    assert_same(move(state, other), update(state, other))


def test_own_rule_moves_the_scale() -> None:
    state = init(OWN)
    for flag, expected in zip(FLAGS, SCALES):
        given = flagged(state, flag)
        assert not exhausted(given, OWN)
        state = update(given, OWN)
        assert state.scale == expected
    assert funcamp.saturated(state, OWN)


@pytest.mark.compiled
def test_own_rule_under_every_transform(transform: Transform) -> None:
    move = transform(lambda state: update(state, OWN))
    state = init(OWN)
    for flag, expected in zip(FLAGS, SCALES):
        state = move(flagged(state, flag))
        assert state.scale == expected


@pytest.mark.compiled
def test_own_rule_in_a_jitted_step_and_its_checkpoint() -> None:
    step = funcamp.make_train_step(
        lambda params, x: (params["w"] * x).sum(), funcamp.stateless(torch.optim.SGD, lr=0.0), OWN
    )
    run = funcamp.jit(step, backend="eager")
    state = step.init({"w": torch.ones(4)})
    for flag, expected in zip(FLAGS, SCALES):
        state, _ = run(state, torch.full((4,), float("inf") if flag else 1.0))
        assert state.scaler.scale == expected
        assert_same(step.load_state_dict(step.state_dict(state), like=state), state)


def test_own_rule_in_a_grad_scaler() -> None:
    scaler = GradScaler("cpu", config=OWN)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for flag, expected in zip(FLAGS, SCALES):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if flag else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert scaler.state_dict()["rest_left"] == 0


def test_own_check_is_called() -> None:
    with pytest.raises(ValueError, match="Gradual: max_scale must be given"):
        ScalerConfig(rule=Gradual())


def test_rule_without_an_outcome_is_refused() -> None:
    class Nothing(rules.Rule):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


@dataclass(frozen=True)
class Returns(rules.Rule):
    """Return an outcome that keeps everything, with some fields changed; or something else."""

    instead: Any

    def first_counters(self) -> dict[str, int]:
        return {"steps": 0}

    def outcome(self, state: ScalerState, config: ScalerConfig) -> rules.Outcome:
        assert isinstance(state, RuleState)
        never = state.found_inf > 1
        kept = rules.Outcome(state.scale, state.growth_tracker, never, never, state.counters)
        changed: rules.Outcome = self.instead(kept)
        return changed


#: How a rule changes its outcome, the error, and what it says that the rule must return and what it got.
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "float64 scale": (
        lambda outcome: outcome._replace(scale=outcome.scale.double()),
        TypeError,
        "whose scale is a torch.float32 tensor of shape (); got a torch.float64 tensor",
    ),
    "number as scale": (
        lambda outcome: outcome._replace(scale=2.0),
        TypeError,
        "whose scale is a torch.float32 tensor of shape (); got 2.0 of type float",
    ),
    "scale of shape (1,)": (
        lambda outcome: outcome._replace(scale=outcome.scale[None]),
        ValueError,
        "whose scale is a torch.float32 tensor of shape (); got a torch.float32 tensor of shape (1,)",
    ),
    "int64 tracker": (
        lambda outcome: outcome._replace(growth_tracker=outcome.growth_tracker.long()),
        TypeError,
        "whose growth_tracker is a torch.int32 tensor of shape (); got a torch.int64 tensor",
    ),
    "int64 counter": (
        lambda outcome: outcome._replace(counters={"steps": outcome.counters["steps"].long()}),
        TypeError,
        "whose steps is a torch.int32 tensor of shape (); got a torch.int64 tensor",
    ),
    "no counter": (
        lambda outcome: outcome._replace(counters={}),
        ValueError,
        "the counters of its first_counters, steps; got none",
    ),
    "float flag": (
        lambda outcome: outcome._replace(backs_off=outcome.backs_off.float()),
        TypeError,
        "whose backs_off is a torch.bool tensor of shape (); got a torch.float32 tensor",
    ),
    "tuple": (lambda outcome: (1.0, 2), TypeError, "a rules.Outcome; got a tuple of a float, an int: write Outcome("),
    "nothing": (lambda outcome: None, TypeError, "a rules.Outcome; got None: write Outcome("),
}


@pytest.mark.parametrize("name", WRONG)
def test_rule_with_a_wrong_outcome_is_refused_when_a_configuration_is_made_with_it(name: str) -> None:
    instead, error, message = WRONG[name]
    with pytest.raises(error, match="^ScalerConfig: the rule Returns must return .*" + re.escape(message)):
        ScalerConfig(rule=Returns(instead))


def test_rule_may_return_a_bool_for_what_it_never_does() -> None:
    config = ScalerConfig(8.0, rule=Returns(lambda outcome: outcome._replace(grows=False, backs_off=False)))
    assert update(init(config), config).scale == 8.0
    assert not exhausted(init(config), config)
