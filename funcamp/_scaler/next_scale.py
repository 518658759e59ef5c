"""The next scale: what the rule of the configuration gives, and the bounds of the configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState, counters_of


def outcome_of(call: str, state: ScalerState, config: ScalerConfig) -> Outcome:
    """Return the outcome of the configuration's rule for one step.

    Raises:
        TypeError: the rule does not return an `Outcome`, or a tensor in it has another dtype.
        ValueError: the rule does not return the counters that it starts with, or a tensor in it has another shape than
            () or another type of device than the state.
    """
    outcome: object = config.rule.outcome(state, config)
    if not isinstance(outcome, Outcome):
        raise TypeError(
            f"{call}: the rule {config.rule.name} must return a rules.Outcome; got {_tree.brief(outcome)}: "
            "write Outcome(scale, growth_tracker, backs_off, grows)"
        )
    if outcome.counters.keys() != counters_of(state).keys():
        raise ValueError(
            f"{call}: the outcome of the rule {config.rule.name} must have the counters of its first_counters, "
            f"{', '.join(counters_of(state)) or 'none'}; got {', '.join(outcome.counters) or 'none'}"
        )
    _check(call, state, config, "scale", outcome.scale, torch.float32)
    _check(call, state, config, "growth_tracker", outcome.growth_tracker, torch.int32)
    for name, decision in (("backs_off", outcome.backs_off), ("grows", outcome.grows)):
        if not isinstance(decision, bool):  # as of a rule that never grows
            _check(call, state, config, name, decision, torch.bool)
    for name, counter in outcome.counters.items():
        _check(call, state, config, f"counters[{name!r}]", counter, torch.int32)
    return outcome


def _check(call: str, state: ScalerState, config: ScalerConfig, name: str, value: object, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError if a field of an outcome cannot be in the next state."""
    device = state.scale.device
    error: type[Exception] = ValueError
    if not isinstance(value, Tensor):
        error, fix = TypeError, f"write torch.full_like(state.scale, ..., dtype={dtype})"
    elif value.dtype != dtype:
        error, fix = TypeError, f"write {name}.to({dtype})"
    elif value.dim() != 0:
        fix = f"write {name}.reshape(())"
    elif value.device.type != device.type:
        fix = "make it on state.scale.device"
    else:
        return
    raise error(
        f"{call}: the rule {config.rule.name} must return an outcome whose {name} is a {dtype} tensor of shape () on "
        f"{device.type}; got {_tree.describe(value)}: {fix}"
    )


def bounded(scale: Tensor, config: ScalerConfig) -> Tensor:
    """Return the scale clamped to [min_scale, max_scale]."""
    return scale.clamp(config.min_scale, config.max_scale) if config.has_bounds else scale
