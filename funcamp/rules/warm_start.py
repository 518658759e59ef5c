"""A fast search for the initial scale, then torch's rule."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import TORCH_RULE, Outcome, Rule
from funcamp._scaler.state import ScalerState, counters_of

#: Upper limit of the search if the configuration has no max_scale: apex's maximum.
_HIGHEST = 2.0**24

#: As many doublings as float32 has from 1 to its largest power of two.
_DOUBLINGS_OF_FLOAT32 = 127


class WarmStart(Rule):
    """Search for the scale, then apply `Dynamic`.

    The counter `stride` is the state of the search:

    stride > 0: no clean step yet. An overflow divides the scale by 2**stride and doubles the stride; from above 1 the
        scale falls to 1 at the lowest, from 1 or below it is halved. The first clean step ends this phase and sets
        how many doublings remain: up to a quarter of the last scale that overflowed, or 127 if none overflowed.
    stride < 0: -stride doublings remain. A clean step doubles the scale. An overflow quarters it and ends the search,
        because half the largest clean scale lasts longer: gradients grow in the first steps (one step fewer is lost in
        benchmarks/warm_start.py).
    stride = 0: the search has ended.
    """

    def first_counters(self) -> dict[str, int]:
        """Return the first stride."""
        return {"stride": 1}

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply one step of the search, or torch's rule if it has ended."""
        overflow = state.found_inf != 0
        stride = counters_of(state)["stride"]
        falling = stride > 0
        climbing = stride < 0
        searching = falling | climbing

        halved = state.scale * 0.5
        fallen = halved
        for power in (2, 4, 8, 16, 32):
            fallen = torch.where(stride == power, state.scale * 2.0**-power, fallen)
        fallen = torch.where(state.scale > 1.0, fallen.clamp(min=1.0), halved)

        # The last fall was by half the stride. A stride of 1 means that no step overflowed.
        doublings_left = torch.where(stride == 1, torch.full_like(stride, _DOUBLINGS_OF_FLOAT32), stride // 2 - 2)
        doublings_left = torch.where(climbing, -stride, doublings_left)
        doubled = state.scale * 2.0
        highest = _HIGHEST if config.max_scale is None else config.max_scale
        climbs = ~overflow & searching & (doublings_left > 0) & (doubled <= highest)

        next_stride = torch.where(climbs, 1 - doublings_left, torch.zeros_like(stride))
        next_stride = torch.where(overflow & falling, (stride * 2).clamp(max=32), next_stride)
        lowered = torch.where(overflow, torch.where(falling, fallen, halved * 0.5), state.scale)

        after_search = TORCH_RULE.outcome(state, config)
        tracker = after_search.growth_tracker
        return Outcome(
            scale=torch.where(searching, torch.where(climbs, doubled, lowered), after_search.scale),
            growth_tracker=torch.where(searching, torch.zeros_like(tracker), tracker),
            backs_off=overflow,
            grows=torch.where(searching, climbs, after_search.grows),
            counters={"stride": next_stride},
        )
