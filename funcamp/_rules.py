"""The update rules: pure functions from a state and a configuration to the next state, one per library's rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcamp._state import ScalerConfig, ScalerState, replace


def widen(scale: Tensor) -> Tensor:
    """The scale in float64, where factors and reciprocals are taken; float32 on MPS, which has no float64."""
    return scale if scale.device.type == "mps" else scale.double()


def dynamic(state: ScalerState, config: ScalerConfig) -> ScalerState:
    """The rule of torch without a branch: `_amp_update_scale_`, native/cuda/AmpKernels.cu, PyTorch 2.13."""
    found = state.found_inf != 0
    wide = widen(state.scale)
    backed_off = (wide * config.backoff_factor).float()
    grown = (wide * config.growth_factor).float()
    grown = torch.where(torch.isfinite(grown), grown, state.scale)
    tracker = state.growth_tracker + 1
    grows = tracker == config.growth_interval
    return replace(
        state,
        scale=torch.where(found, backed_off, torch.where(grows, grown, state.scale)),
        growth_tracker=torch.where(found | grows, torch.zeros_like(tracker), tracker),
    )


def static(state: ScalerState, _: ScalerConfig) -> ScalerState:
    """Nothing changes."""
    return state


RULES: dict[str, Callable[[ScalerState, ScalerConfig], ScalerState]] = {"dynamic": dynamic, "static": static}
