"""The scaler's configuration: Python values only, checked when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from funcamp import _tree
from funcamp._check import integer, real
from funcamp._scaler.rule import Outcome, Rule, Torch
from funcamp._scaler.state import ScalerState, check_state, counters_of, tensors_of, with_counters

_INT32_MAX = torch.iinfo(torch.int32).max
_CALL = "ScalerConfig"
_FLOAT32_MAX = torch.finfo(torch.float32).max


def positive_float32(call: str, name: str, value: object, kind: str = "a Python number") -> float:
    """Return a number; raise TypeError or ValueError if it is none, or in float32 not above 0 or infinite."""
    requirement = f"positive and finite in float32, from 2**-149 to {_FLOAT32_MAX}"
    return _between(call, name, value, 2.0**-149, _FLOAT32_MAX, requirement, kind)


def _between(
    call: str,
    name: str,
    value: object,
    least: float,
    most: float,
    requirement: str,
    kind: str = "a Python number",
) -> float:
    """Return a number from least to most."""
    number = real(call, name, value, kind)
    if not least <= number <= most:
        raise ValueError(f"{call}: {name} must be {requirement}; got {value}")
    return number


@dataclass(frozen=True)
class ScalerConfig:
    """The constants of the scale's update rule: Python values, hashable, constants of a compiled graph.

    Args:
        init_scale: the scale before the first step; positive, finite in float32.
        growth_factor: multiplies the scale after `growth_interval` clean steps; finite, 1 or more.
        backoff_factor: multiplies the scale after a step with a non-finite gradient; in (0, 1]. The rules of apex,
            DeepSpeed, jmp, TensorFlow and fairseq divide by growth_factor: with them it must be 1 / growth_factor.
        growth_interval: clean steps in a row after which the scale grows; an integer from 1 to 2**31 - 1.
        min_scale: lower bound of the scale, applied at every update (a loaded scale below it is used for one step);
            None for no bound, in which case repeated backoff reaches 0, as in torch.
        max_scale: upper bound of the scale, applied likewise; None for no bound but float32's.
        rule: how the scale changes, a `funcamp.rules.Rule` with its own parameters; by default the rule that `update`
            describes. The presets have the rules of other libraries.

    Raises:
        TypeError: a value is not of the type given above, the rule has an attribute that is no field of its dataclass,
            or its outcome is no `Outcome` with tensors and counters of a state.
        ValueError: a value is out of the range given above, init_scale is outside [min_scale, max_scale], or the rule
            does not fit the other values.

    Example:
        >>> ScalerConfig(init_scale=2.0**10, min_scale=1.0)  # doctest: +ELLIPSIS
        ScalerConfig(init_scale=1024.0, ..., min_scale=1.0, ..., rule=Torch())

    References:
        Names and defaults: torch/amp/grad_scaler.py, PyTorch 2.13.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    rule: Rule = field(default_factory=lambda: Torch())  # Dynamo traces a function here, and neither class nor object

    def __post_init__(self) -> None:
        growth = _between(
            _CALL, "growth_factor", self.growth_factor, 1.0, _FLOAT32_MAX, "1 or more and finite in float32"
        )
        backoff = _between(_CALL, "backoff_factor", self.backoff_factor, math.ulp(0.0), 1.0, "above 0 and at most 1")
        checked: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff}
        checked["growth_interval"] = integer(_CALL, "growth_interval", self.growth_interval, 1, _INT32_MAX)
        for name in ("init_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            if value is not None or name == "init_scale":
                checked[name] = positive_float32(_CALL, name, value)
        _check_rule(self.rule)
        min_scale = checked.get("min_scale")
        max_scale = checked.get("max_scale")
        lowest = 0.0 if min_scale is None else min_scale
        highest = math.inf if max_scale is None else max_scale
        if lowest > highest:
            raise ValueError(f"{_CALL}: min_scale must not be above max_scale; got {min_scale} and {max_scale}")
        if not lowest <= checked["init_scale"] <= highest:
            raise ValueError(
                f"{_CALL}: init_scale must be within [min_scale, max_scale]; "
                f"got {checked['init_scale']} with min_scale {min_scale} and max_scale {max_scale}"
            )
        # The numbers as floats and ints: a frozen dataclass is set only this way.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self.rule.check(self)
        if not type(self.rule).__module__.startswith("funcamp."):
            _check_fields(self.rule)
            _check_outcome(self)  # those of this package have tests; a configuration may be made in a trace

    @property
    def has_bounds(self) -> bool:
        """Return whether the scale is clamped after the rule."""
        return self.min_scale is not None or self.max_scale is not None

    @property
    def is_torchs(self) -> bool:
        """Return whether torch's kernel, which gets the first four fields, moves the scale in the same way."""
        others = [field.name for field in fields(self)[4:]]
        return all(getattr(self, name) == getattr(_DEFAULT, name) for name in others)


def _check_rule(rule: object) -> None:
    """Raise TypeError if a configuration's rule is not a `Rule`."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"{_CALL}: rule must be a Rule; got {_tree.brief(rule)}: funcamp.presets has a function for each"
        )


def _check_fields(rule: Rule) -> None:
    """Raise TypeError if a rule has an attribute that is no field: rules that differ in it only would be equal."""
    others = vars(rule).keys() - {field.name for field in fields(rule)}
    if others:
        raise TypeError(
            f"{_CALL}: rule must keep its parameters in fields of a frozen dataclass, by which rules are compared; "
            f"got a {rule.name} with {', '.join(sorted(others))}: write @dataclass(frozen=True) above the class, and "
            "a line 'name: type' in it for each parameter, in place of __init__"
        )


def _check_outcome(config: ScalerConfig) -> None:
    """Call the rule of a configuration with a first state on the CPU: it must return what a next state has.

    Raises:
        TypeError: it does not return an `Outcome`, a field is not a tensor of the right dtype, or the counters are not
            those that the rule starts with.
        ValueError: a field has another shape than ().
    """
    rule = config.rule
    state = ScalerState(
        scale=torch.tensor(config.init_scale, dtype=torch.float32, device="cpu"),
        growth_tracker=torch.tensor(0, dtype=torch.int32, device="cpu"),
        found_inf=torch.tensor(0.0, dtype=torch.float32, device="cpu"),
    )
    outcome: object = rule.outcome(with_counters(state, tensors_of(rule.first_counters(), "cpu")), config)
    if not isinstance(outcome, Outcome):
        raise TypeError(
            f"{_CALL}: the rule {rule.name} must return a rules.Outcome; got {_tree.brief(outcome)}: "
            "write Outcome(scale, growth_tracker, backs_off, grows)"
        )
    next_state = ScalerState(outcome.scale, outcome.growth_tracker, state.found_inf)
    check_state_and_config(
        f"{_CALL}: in the outcome of rule {rule.name}", with_counters(next_state, dict(outcome.counters)), config
    )


def check_config(call: str, config: object) -> ScalerConfig:
    """Return the configuration if it is a `ScalerConfig`; raise TypeError otherwise."""
    if not isinstance(config, ScalerConfig):
        raise TypeError(
            f"{call}: config must be a ScalerConfig; got {_tree.brief(config)}: write ScalerConfig(init_scale=...), "
            "or take one of funcamp.presets"
        )
    return config


def check_state_and_config(call: str, state: ScalerState, config: ScalerConfig) -> tuple[ScalerState, ScalerConfig]:
    """Check that a state and a configuration belong together, and return both.

    Raises:
        TypeError: one has another type, or the state lacks the counters of the configuration's rule.
        ValueError: a field of the state has a shape other than ().
    """
    state, config = check_state(call, state), check_config(call, config)
    rules_counters = sorted(config.rule.first_counters())
    states_counters = sorted(counters_of(state))
    if rules_counters != states_counters:
        raise TypeError(
            f"{call}: state must count {', '.join(rules_counters) or 'clean steps only'}, as init makes it for the "
            f"rule {config.rule.name}; got one that counts {', '.join(states_counters) or 'clean steps only'} (config "
            "must be the one that the state was made with)"
        )
    return state, config


#: What `is_torchs` compares with.
_DEFAULT = ScalerConfig()
