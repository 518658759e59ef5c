"""Rules that return what they must not, and states of another rule: what is called, the error, and its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from funcamp import ScalerConfig, ScalerState, init, presets, rules, update
from funcamp._scaler.state import RuleState


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
