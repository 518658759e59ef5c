"""Statistics that show where a model's numbers fit a narrow format and where they do not.

`stats` counts one tensor. `tap` returns the counts of a forward and a backward pass through a gradient. `track_scales`
taps the layers of a loss's module in a training step. `numerics_report`, which runs a step once and records every
operation, is in `funcamp.report` and importable from here too, as its other names are.
"""

import importlib
from typing import Any

from funcamp.numerics.record import Record, Records, probe
from funcamp.numerics.statistics import Stats, stats
from funcamp.numerics.taps import tap
from funcamp.numerics.track import TrackedLoss, track_scales

__all__ = [
    "Record",
    "Records",
    "Stats",
    "TrackedLoss",
    "probe",
    "stats",
    "tap",
    "track_scales",
]

#: The names of `funcamp.report`, which is imported when one of them is first used: a step with taps needs none.
_OF_THE_REPORT = {"NumericsReport", "Operation", "Origin", "Recommendation", "annotate", "numerics_report"}


def __getattr__(name: str) -> Any:
    """Import the report when one of its names is first used."""
    if name in _OF_THE_REPORT:
        return getattr(importlib.import_module("funcamp.report"), name)
    raise AttributeError(f"module 'funcamp.numerics' has no attribute {name!r}")
