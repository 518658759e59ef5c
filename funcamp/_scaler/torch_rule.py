"""funcamp's own rules: torch's, a scale that stays, and torch's after a search: state and constants to what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcamp._scaler.state import ScalerState, replace

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


class Outcome(NamedTuple):
    """What a rule makes of a step, before the bounds of the configuration."""

    state: Any
    """The next state; found_inf is left as it was."""
    backs_off: Tensor
    """bool: whether the rule lowers the scale at this step, if it can."""
    grows: Tensor
    """bool: whether it raises the scale, if it can."""


def widen(scale: Tensor) -> Tensor:
    """The scale in float64, where factors and reciprocals are taken; float32 on MPS, which has no float64."""
    return scale if scale.device.type == "mps" else scale.double()


def dynamic(state: ScalerState, config: ScalerConfig) -> Outcome:
    """The rule of torch without a branch: `_amp_update_scale_`, native/cuda/AmpKernels.cu, PyTorch 2.13."""
    found = state.found_inf != 0
    wide = widen(state.scale)
    backed_off = (wide * config.backoff_factor).float()
    grown = (wide * config.growth_factor).float()
    grown = torch.where(torch.isfinite(grown), grown, state.scale)
    tracker = state.growth_tracker + 1
    grows = ~found & (tracker == config.growth_interval)
    new = replace(
        state,
        scale=torch.where(found, backed_off, torch.where(grows, grown, state.scale)),
        growth_tracker=torch.where(found | grows, torch.zeros_like(tracker), tracker),
    )
    return Outcome(new, found, grows)


def static(state: ScalerState, _: ScalerConfig) -> Outcome:
    """Nothing changes."""
    never = torch.zeros_like(state.found_inf, dtype=torch.bool)
    return Outcome(state, never, never)


#: The scale that a search climbs to at most, where the configuration has no max_scale: apex's maximum.
_CLIMB_TO = 2.0**24


def warm_start(state: Any, config: ScalerConfig) -> Outcome:
    """Find the scale, then `dynamic`.

    stride > 0, no clean step yet: an overflow divides the scale by 2**stride, from above 1 down to 1 at the least, at 1
    and below by 2; and doubles the stride. The first clean step leaves the doublings that lead up to a quarter of what
    overflowed last, or many where none did. stride < 0: a clean step doubles the scale, an overflow quarters it and
    ends the search, stride = 0: half the largest clean scale lasts longer, for gradients grow in the first steps
    (benchmarks/warm_start.py: a step less is lost).
    """
    found, stride = state.found_inf != 0, state.counters["stride"]
    falling, climbing = stride > 0, stride < 0
    halved = fallen = state.scale * 0.5
    for power in (2, 4, 8, 16, 32):
        fallen = torch.where(stride == power, state.scale * 2.0**-power, fallen)
    fallen = torch.where(state.scale > 1.0, fallen.clamp(min=1.0), halved)
    # half the stride is what the last fall was; 127 doublings span float32
    left = torch.where(stride == 1, torch.full_like(stride, 127), stride // 2 - 2)
    left = torch.where(climbing, -stride, left)
    raised = state.scale * 2.0
    top = _CLIMB_TO if config.max_scale is None else config.max_scale
    climbs = ~found & (falling | climbing) & (left > 0) & (raised <= top)
    after = torch.where(climbs, 1 - left, torch.zeros_like(stride))
    after = torch.where(found & falling, (stride * 2).clamp(max=32), after)
    fallen = torch.where(found, torch.where(falling, fallen, halved * 0.5), state.scale)
    searching, known = falling | climbing, dynamic(state, config)
    tracker = known.state.growth_tracker
    new = replace(
        state,
        scale=torch.where(searching, torch.where(climbs, raised, fallen), known.state.scale),
        growth_tracker=torch.where(searching, torch.zeros_like(tracker), tracker),
        counters={"stride": after},
    )
    return Outcome(new, found, torch.where(searching, climbs, known.grows))
