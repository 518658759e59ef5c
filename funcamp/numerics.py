"""Statistics that show where a model's numbers fit a narrow format and where they do not.

`stats` counts one tensor. `tap` returns the counts of a forward and a backward pass through a gradient. `track_scales`
taps the layers of a module, also in a training step. `numerics_report` runs a step once and records every operation.
"""

from funcamp._numerics.record import Record, Records, probe
from funcamp._numerics.stats import Stats, stats
from funcamp._numerics.tap import tap
from funcamp._numerics.track import TrackedLoss, TrackedModule, track_scales
from funcamp._report.float8_fit import Float8Layer
from funcamp._report.passes import Operation
from funcamp._report.plot import plot_flushed
from funcamp._report.render import annotate
from funcamp._report.report import NumericsReport, Origin, Recommendation, numerics_report

__all__ = [
    "Float8Layer",
    "NumericsReport",
    "Operation",
    "Origin",
    "Recommendation",
    "Record",
    "Records",
    "Stats",
    "TrackedLoss",
    "TrackedModule",
    "annotate",
    "numerics_report",
    "plot_flushed",
    "probe",
    "stats",
    "tap",
    "track_scales",
]
