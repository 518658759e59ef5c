"""The next scale: what the rule of the configuration gives, and the bounds of the configuration."""

from __future__ import annotations

from torch import Tensor

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState, counters_of


def outcome_of(call: str, state: ScalerState, config: ScalerConfig) -> Outcome:
    """Return the outcome of the configuration's rule for one step.

    Raises:
        ValueError: the rule does not return the counters that it starts with.
    """
    outcome = config.rule.outcome(state, config)
    if outcome.counters.keys() != counters_of(state).keys():
        raise ValueError(
            f"{call}: the outcome of the rule {config.rule.name} must have the counters of its first_counters, "
            f"{', '.join(counters_of(state)) or 'none'}; got {', '.join(outcome.counters) or 'none'}"
        )
    return outcome


def bounded(scale: Tensor, config: ScalerConfig) -> Tensor:
    """Return the scale clamped to [min_scale, max_scale]."""
    return scale.clamp(config.min_scale, config.max_scale) if config.has_bounds else scale
