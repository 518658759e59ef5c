"""funcamp's own update rules: torch's, static, and torch's after a search for the initial scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcamp._scaler.precision import widen
from funcamp._scaler.state import ScalerState, replace

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


class Outcome(NamedTuple):
    """The result of a rule for one step, before the configuration's bounds."""

    state: Any
    """The next state; found_inf is unchanged."""
    backs_off: Tensor
    """bool: whether the rule lowers the scale at this step, if it can."""
    grows: Tensor
    """bool: whether the rule raises the scale at this step, if it can."""


def dynamic(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule without branches: `_amp_update_scale_`, native/cuda/AmpKernels.cu, PyTorch 2.13."""
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
    """Keep the state unchanged."""
    never = torch.zeros_like(state.found_inf, dtype=torch.bool)
    return Outcome(state, never, never)


#: Upper limit of the search if the configuration has no max_scale: apex's maximum.
_CLIMB_TO = 2.0**24


def warm_start(state: Any, config: ScalerConfig) -> Outcome:
    """Search for the scale, then apply `dynamic`.

    stride > 0: no clean step yet. An overflow divides the scale by 2**stride and doubles the stride; from above 1 the
        scale falls to 1 at the lowest, from 1 or below it is halved. The first clean step ends this phase and sets
        how many doublings remain: up to a quarter of the last scale that overflowed, or 127 if none overflowed.
    stride < 0: a clean step doubles the scale. An overflow quarters it and ends the search, because half the largest
        clean scale lasts longer: gradients grow in the first steps (one step fewer is lost in
        benchmarks/warm_start.py).
    stride = 0: the search has ended.
    """
    found, stride = state.found_inf != 0, state.counters["stride"]
    falling, climbing = stride > 0, stride < 0
    halved = fallen = state.scale * 0.5
    for power in (2, 4, 8, 16, 32):
        fallen = torch.where(stride == power, state.scale * 2.0**-power, fallen)
    fallen = torch.where(state.scale > 1.0, fallen.clamp(min=1.0), halved)
    # the last fall was by half the stride; 127 doublings span float32
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
