"""The rule of fairseq."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from funcamp._check import real
from funcamp._scaler.config import ScalerConfig, positive_float32
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState, counters_of, widen
from funcamp.rules.arithmetic import MovedScales, growth_due_again, inverse, is_overflow, move, moved_scales


@dataclass(frozen=True)
class Fairseq(Rule):
    """Back off if overflows are a large enough share of the steps since the scale last changed.

    At a backoff to stop_scale fairseq raises; here the scale is restored and, as in fairseq, the next clean step grows.

    Args:
        tolerance: share of the steps since the last change that must overflow for a backoff; from 0 to 1.
        stop_scale: a backoff to this value or below is undone, and the scale is `exhausted`; positive, finite in
            float32.

    Raises:
        TypeError: one is not a number.
        ValueError: one is out of range.
    """

    divides = True

    tolerance: float = 0.0
    stop_scale: float = 1e-4

    def __post_init__(self) -> None:
        tolerance = real(self.name, "tolerance", self.tolerance)
        if not 0.0 <= tolerance <= 1.0:
            raise ValueError(f"{self.name}: tolerance must be from 0 to 1; got {self.tolerance}")
        object.__setattr__(self, "tolerance", tolerance)
        object.__setattr__(self, "stop_scale", positive_float32(self.name, "stop_scale", self.stop_scale))

    def first_counters(self) -> dict[str, int]:
        """Return the steps since the scale last changed, at first 1 as in fairseq, and the overflows among them."""
        return {"since_rescale": 1, "overflows": 0}

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `DynamicLossScaler`."""
        overflow = is_overflow(state)
        steps = counters_of(state)["since_rescale"]
        overflows = counters_of(state)["overflows"] + overflow.int()
        # fairseq takes 1000 for 0 steps, so that it does not divide by zero.
        since_rescale = torch.where(steps == 0, 1000, steps)
        share = widen(overflows.float()) / widen(since_rescale.float())
        backs_off = overflow & (share >= self.tolerance)
        grows = growth_due_again(state, config.growth_interval)

        scales = moved_scales(state, config, factors=torch.float64)
        if config.min_scale is not None:  # fairseq applies its minimum before it compares with stop_scale
            scales = MovedScales(scales.lower.clamp(min=config.min_scale), scales.higher)
        moved = move(state, scales, grows=grows, backs_off=backs_off)
        stops = overflow & (widen(moved.scale) <= self.stop_scale)
        return Outcome(
            scale=torch.where(stops, state.scale, moved.scale),
            growth_tracker=torch.where(stops, config.growth_interval - 1, moved.growth_tracker),
            backs_off=backs_off | stops,
            grows=grows,
            counters={
                "since_rescale": torch.where(backs_off | grows, 1, steps + 1) - stops.int(),
                "overflows": torch.where(backs_off, 0, overflows),
            },
        )


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> ScalerConfig:
    """Return the rule of fairseq's `DynamicLossScaler`.

    An overflow backs off if a share of at least tolerance of the steps since the last change overflowed. At
    min_loss_scale fairseq raises FloatingPointError; here the scale stays and `exhausted` is set. The scale is float32;
    fairseq's is a Python float.

    Example:
        >>> presets.fairseq(tolerance=0.05).rule
        Fairseq(tolerance=0.05, stop_scale=0.0001)

    References:
        fairseq/optim/dynamic_loss_scaler.py, facebookresearch/fairseq at 0d77035e.
    """
    rule = Fairseq(tolerance, stop_scale=min_loss_scale)
    backoff_factor = inverse("scale_factor", scale_factor)
    return ScalerConfig(
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=backoff_factor,
        growth_interval=scale_window,
        min_scale=threshold,
        rule=rule,
    )
