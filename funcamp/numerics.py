"""Where a narrow format holds a model's numbers and where not: statistics as values.

`stats` counts a tensor, `tap` brings the counts of both passes out of a gradient, `track_scales` taps the layers of a
module.
"""

from funcamp._stats import Stats, stats
from funcamp._tap import Record, probe, tap
from funcamp._track import TrackedLoss, TrackedModule, track_scales

__all__ = ["Record", "Stats", "TrackedLoss", "TrackedModule", "probe", "stats", "tap", "track_scales"]
