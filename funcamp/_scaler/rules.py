"""The core's rules: torch's, and a scale that never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from funcamp._scaler.precision import widen
from funcamp._scaler.rule import Outcome, Rule
from funcamp._scaler.state import ScalerState

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


class Dynamic(Rule):
    """The rule of torch, which `update` describes."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply torch's rule without branches: `_amp_update_scale_`, native/cuda/AmpKernels.cu, PyTorch 2.13."""
        overflow = state.found_inf != 0
        wide_scale = widen(state.scale)
        lower = (wide_scale * config.backoff_factor).float()
        higher = (wide_scale * config.growth_factor).float()
        higher = torch.where(torch.isfinite(higher), higher, state.scale)

        clean_steps = state.growth_tracker + 1
        grows = ~overflow & (clean_steps == config.growth_interval)
        return Outcome(
            scale=torch.where(overflow, lower, torch.where(grows, higher, state.scale)),
            growth_tracker=torch.where(overflow | grows, torch.zeros_like(clean_steps), clean_steps),
            backs_off=overflow,
            grows=grows,
        )


TORCH_RULE = Dynamic()


class Static(Rule):
    """The scale never changes."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:  # noqa: ARG002 - a rule's signature
        """Return the scale and the tracker unchanged."""
        never = torch.zeros_like(state.found_inf, dtype=torch.bool)
        return Outcome(state.scale, state.growth_tracker, backs_off=never, grows=never)
