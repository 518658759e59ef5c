"""The claim: a rule is a value, and a rule of your own works wherever a library's does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import funcamp
from funcamp import ScalerConfig, ScalerState, exhausted, init, presets, rules, update
from funcamp._scaler.state import RuleState
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


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_is_a_value(rule: rules.Rule) -> None:
    config = ScalerConfig(rule=rule)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert other == config
        assert hash(other) == hash(config)
    assert eval(repr(rule), {rule.name: type(rule)}) == rule
    assert [other for other in RULES.values() if other == rule] == [rule]


@pytest.mark.compiled
def test_a_configuration_is_a_constant_of_a_compiled_function() -> None:
    move = torch.compile(update, fullgraph=True, backend="eager")
    for config in (OWN, replace(OWN, max_scale=8.0), presets.megatron()):
        assert_same(move(init(config), config), update(init(config), config))


@pytest.mark.compiled
def test_own_rule_moves_the_scale_under_every_transform(transform: Transform) -> None:
    move = transform(lambda state: update(state, OWN))
    state = init(OWN)
    for flag, expected in zip(FLAGS, SCALES):
        given = flagged(state, flag)
        assert not exhausted(given, OWN)
        state = move(given)
        assert state.scale == expected
    assert funcamp.saturated(state, OWN)


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


def test_own_check_is_called() -> None:
    with pytest.raises(ValueError, match="Gradual: max_scale must be given"):
        ScalerConfig(rule=Gradual())


# Rules that return what they must not, and states of another rule: what is called, the error, and its words.


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


class NoOutcome(rules.Rule):
    """A rule without its method."""


class ByInit(rules.Rule):
    """A rule with a parameter that is no field: equal to one with another."""

    def __init__(self, rest: int) -> None:
        self.rest = rest

    def outcome(self, state: ScalerState, config: ScalerConfig) -> rules.Outcome:
        return presets.torch().rule.outcome(state, config)


def returns(instead: Callable[[rules.Outcome], Any]) -> Callable[[], object]:
    return lambda: ScalerConfig(rule=Returns(instead))


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a dtype": (
        returns(lambda outcome: outcome._replace(scale=outcome.scale.double())),
        *(TypeError, "outcome of rule Returns: state.scale must be a torch.float32 tensor; got a torch.float64 tensor"),
    ),
    "a shape": (
        returns(lambda outcome: outcome._replace(growth_tracker=outcome.growth_tracker[None])),
        *(ValueError, r"outcome of rule Returns: state.growth_tracker must have shape \(\); got \(1,\)"),
    ),
    "a counter": (
        returns(lambda outcome: outcome._replace(counters={"steps": outcome.scale})),
        *(TypeError, "outcome of rule Returns: state.steps must be a torch.int32 tensor; got a torch.float32 tensor"),
    ),
    "no counter": (
        returns(lambda outcome: outcome._replace(counters={})),
        *(TypeError, "outcome of rule Returns: state must count steps, .*; got one that counts clean steps only"),
    ),
    "a tuple": (returns(tuple), TypeError, r"a rules.Outcome; got a tuple .*write Outcome\("),
    "a parameter that is no field": (
        lambda: ScalerConfig(rule=ByInit(3)),
        *(TypeError, r"got a ByInit with rest: write @dataclass\(frozen=True\)"),
    ),
    "no outcome": (NoOutcome, TypeError, "abstract"),
    "another rule's state": (
        lambda: update(init(presets.megatron())),
        *(TypeError, "must count clean steps only, .* got .* hysteresis"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name(name: str) -> None:
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()
