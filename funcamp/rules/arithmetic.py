"""What the rules of other libraries share: the moved scales, when growth is due, and the overflows left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._check import integer, real
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState, counters_of, widen

_INT32_MAX = torch.iinfo(torch.int32).max


class MovedScales(NamedTuple):
    """The scale after a move in each direction."""

    lower: Tensor
    """float32: the scale after a backoff."""
    higher: Tensor
    """float32: the scale after growth."""


def moved_scales(
    state: ScalerState, config: ScalerConfig, *, factors: torch.dtype, finite_growth: bool = False
) -> MovedScales:
    """Return the scale after a backoff and after growth: one product or quotient in float64, rounded to float32.

    Args:
        state: the state, whose scale moves.
        config: the configuration; if its rule divides, so does the backoff.
        factors: float32 if the library rounds the factors to it, float64 if it does not.
        finite_growth: whether growth that would be infinite keeps the scale.
    """
    wide_scale = widen(state.scale)

    # A tensor, because a CUDA kernel multiplies by the reciprocal of a Python number instead of dividing by it.
    def factor_tensor(factor: float) -> Tensor:
        if factors == torch.float32:
            return widen(torch.full_like(state.scale, factor))
        return torch.full_like(wide_scale, factor)

    if config.rule.divides:
        lower = wide_scale / factor_tensor(config.growth_factor)
    else:
        lower = wide_scale * factor_tensor(config.backoff_factor)
    higher = (wide_scale * factor_tensor(config.growth_factor)).float()
    if finite_growth:
        higher = torch.where(torch.isfinite(higher), higher, state.scale)
    return MovedScales(lower.float(), higher)


def is_overflow(state: ScalerState) -> Tensor:
    """Return whether a gradient of this step is not finite."""
    return state.found_inf != 0


def growth_due(state: ScalerState, interval: int) -> Tensor:
    """Return whether this is the interval-th clean step in a row."""
    clean_steps = state.growth_tracker + 1
    return ~is_overflow(state) & (clean_steps == interval)


def growth_due_again(state: ScalerState, interval: int, *, first_is_late: bool = False) -> Tensor:
    """Return whether the number of clean steps in a row is a multiple of the interval.

    A tracker beyond the interval grows too: one that was resumed with a shorter interval.

    Args:
        state: the state.
        interval: clean steps from one growth to the next.
        first_is_late: whether the first growth takes one more. The tracker then restarts at 1 after growth.
    """
    clean_steps = state.growth_tracker + 1
    if first_is_late:
        clean_steps = clean_steps - 1
    return ~is_overflow(state) & (clean_steps > 0) & (clean_steps % interval == 0)


def move(
    state: ScalerState,
    scales: MovedScales,
    *,
    grows: Tensor,
    backs_off: Tensor | None = None,
    tracker_after_growth: int = 0,
    counters: dict[str, Tensor] | None = None,
) -> Outcome:
    """Return the outcome of a decision. The growth tracker restarts at every overflow and at growth.

    Args:
        state: the state before the step's move.
        scales: the scale after a backoff and after growth.
        grows: whether the scale grows.
        backs_off: whether it is lowered; None if every overflow does that.
        tracker_after_growth: the growth tracker after growth.
        counters: the next values of the rule's further counters.
    """
    overflow = is_overflow(state)
    if backs_off is None:
        backs_off = overflow
    clean_steps = state.growth_tracker + 1
    return Outcome(
        scale=torch.where(backs_off, scales.lower, torch.where(grows, scales.higher, state.scale)),
        growth_tracker=torch.where(overflow, 0, torch.where(grows, tracker_after_growth, clean_steps)),
        backs_off=backs_off,
        grows=grows,
        counters={} if counters is None else counters,
    )


@dataclass(frozen=True)
class HysteresisRule(Rule):
    """Base of the rules that lower the scale only after several overflows.

    Its counter `hysteresis_tracker` holds the overflows that are left; below 1 the next overflow backs off.

    Args:
        hysteresis: number of overflows before a backoff; an integer from 1 to 2**31 - 1.

    Raises:
        TypeError: hysteresis is not an integer.
        ValueError: it is out of range.
    """

    hysteresis: int = 1

    def __post_init__(self) -> None:
        number = integer(self.name, "hysteresis", self.hysteresis, 1, _INT32_MAX)
        object.__setattr__(self, "hysteresis", number)

    def first_counters(self) -> dict[str, int]:
        """Return the number of overflows before the first backoff."""
        return {"hysteresis_tracker": self.hysteresis}

    def overflows_left(self, state: ScalerState) -> Tensor:
        """Return how many overflows are left after this step."""
        return counters_of(state)["hysteresis_tracker"] - is_overflow(state).int()


def inverse(name: str, factor: object) -> float:
    """Return 1 / factor, because the library divides by the factor that it also multiplies by.

    Raises:
        TypeError: factor is not a number.
        ValueError: factor is not above 1.
    """
    number = real("ScalerConfig", name, factor)
    if not number > 1.0:
        raise ValueError(f"ScalerConfig: {name} must be above 1; got {factor}")
    return 1.0 / number
