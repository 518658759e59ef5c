"""What funcamp is measured against: the rule in plain Python, and torch's own kernel."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from funcamp import ScalerState


def float32(value: float) -> float:
    """A Python float rounded to float32."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@dataclass
class PlainRule:
    """The update rule on Python numbers."""

    scale: float
    tracker: int
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def update(self, found_inf: float) -> None:
        """One step; any nonzero flag, NaN too, is an overflow."""
        if found_inf != 0:
            self.scale, self.tracker = float32(self.scale * self.backoff), 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            grown = float32(self.scale * self.growth)
            self.scale, self.tracker = (grown if math.isfinite(grown) else self.scale), 0


@dataclass
class TorchRule:
    """`torch._amp_update_scale_` on tensors of its own."""

    state: ScalerState
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def update(self, found_inf: float) -> None:
        """One step, in place."""
        flag = torch.full_like(self.state.found_inf, found_inf)
        torch._amp_update_scale_(
            self.state.scale, self.state.growth_tracker, flag, self.growth, self.backoff, self.interval
        )


def state_of(scale: float, tracker: int = 0, found_inf: float = 0.0) -> ScalerState:
    """A scaler state from Python numbers."""
    return ScalerState(
        torch.tensor(scale, dtype=torch.float32),
        torch.tensor(tracker, dtype=torch.int32),
        torch.tensor(found_inf, dtype=torch.float32),
    )


def flagged(state: ScalerState, found_inf: bool) -> ScalerState:
    """A scaler state with this flag, of any rule: what a rule adds comes behind."""
    return type(state)(*state[:2], torch.tensor(float(found_inf)), *state[3:])
