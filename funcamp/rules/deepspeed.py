"""The rule of DeepSpeed's `DynamicLossScaler`, which its `FP16_Optimizer` has without hysteresis."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from funcamp._check import boolean
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState
from funcamp.rules.arithmetic import HysteresisRule, growth_due_again, is_overflow, move, moved_scales


@dataclass(frozen=True)
class DeepSpeed(HysteresisRule):
    """The first growth is a step late. Overflows beyond the hysteresis lower the scale until the count is reset.

    Args:
        hysteresis: number of overflows before a backoff; an integer from 1 to 2**31 - 1.
        consecutive: whether any clean step resets the count of overflows, and not only growth.

    Raises:
        TypeError: hysteresis is not an integer, or consecutive not a bool.
        ValueError: hysteresis is out of range.
    """

    divides = True

    consecutive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        boolean(self.name, "consecutive", self.consecutive)

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply the rule of `DynamicLossScaler`. A count of overflows that is used up stays at 1."""
        overflow = is_overflow(state)
        left = self.overflows_left(state)
        grows = growth_due_again(state, config.growth_interval, first_is_late=True)
        resets = ~overflow if self.consecutive else grows
        return move(
            state,
            moved_scales(state, config, factors=torch.float64),
            grows=grows,
            backs_off=overflow & (left <= 0),
            tracker_after_growth=1,
            counters={"hysteresis_tracker": torch.where(resets, self.hysteresis, left.clamp(min=1))},
        )


def deepspeed(
    init_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
) -> ScalerConfig:
    """Return the rule of DeepSpeed's `DynamicLossScaler`, 0.17.1 or later.

    The defaults are those of its fp16 section. The delayed_shift-th overflow and every later one lower the scale, until
    the count is reset: by growth, or with consecutive_hysteresis by any clean step. The first growth takes scale_window
    + 1 clean steps. If the scale is at its minimum, DeepSpeed raises; here `exhausted` is set. The scale is float32;
    DeepSpeed's is a Python float.

    Example:
        >>> presets.deepspeed(consecutive_hysteresis=True).rule
        DeepSpeed(hysteresis=2, consecutive=True)

    References:
        deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.19.8.
    """
    rule = DeepSpeed(delayed_shift, consecutive_hysteresis)
    return ScalerConfig(
        init_scale=init_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=scale_window,
        min_scale=min_scale,
        rule=rule,
    )


def deepspeed_fp16(
    init_scale: float = 2.0**32,
    scale_window: int = 1000,
    min_scale: float = 1.0,
) -> ScalerConfig:
    """Return the rule of DeepSpeed's `FP16_Optimizer`.

    No hysteresis; the first growth takes scale_window + 1 clean steps. `FP16_UnfusedOptimizer` uses it with 2**16, 1000
    and 0.25. The scale is float32; DeepSpeed's is a Python float.

    Example:
        >>> presets.deepspeed_fp16().rule
        DeepSpeed(hysteresis=1, consecutive=False)

    References:
        deepspeed/runtime/fp16/fused_optimizer.py, DeepSpeed 0.9.0 to 0.19.8.
    """
    return deepspeed(init_scale, scale_window, min_scale, delayed_shift=1)
