"""Statistics that show where a model's numbers fit a narrow format and where they do not.

`stats` counts one tensor. `tap` returns the counts of a forward and a backward pass through a gradient. `track_scales`
taps the layers of a module, also in a training step. `numerics_report` runs a step once and records every operation.
"""

import importlib
from typing import TYPE_CHECKING, Any

from funcamp.numerics.record import Record, Records, probe
from funcamp.numerics.statistics import Stats, stats
from funcamp.numerics.taps import tap
from funcamp.numerics.track import TrackedLoss, TrackedModule, track_scales

if TYPE_CHECKING:
    from funcamp.numerics.report.backward_passes import Operation
    from funcamp.numerics.report.float8_fit import Float8Layer
    from funcamp.numerics.report.origin import Origin
    from funcamp.numerics.report.plot import plot_flushed
    from funcamp.numerics.report.recommendation import Recommendation
    from funcamp.numerics.report.render import annotate
    from funcamp.numerics.report.report import NumericsReport, numerics_report

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

#: The names of the report, with their modules. A step with taps needs none of them, and the report imports torch's
#: compiler, which takes seconds.
_OF_THE_REPORT = {
    "Float8Layer": "float8_fit",
    "NumericsReport": "report",
    "Operation": "backward_passes",
    "Origin": "origin",
    "Recommendation": "recommendation",
    "annotate": "render",
    "numerics_report": "report",
    "plot_flushed": "plot",
}


def __getattr__(name: str) -> Any:
    """Import the report when one of its names is first used."""
    if name in _OF_THE_REPORT:
        return getattr(importlib.import_module(f"funcamp.numerics.report.{_OF_THE_REPORT[name]}"), name)
    raise AttributeError(f"module 'funcamp.numerics' has no attribute {name!r}")
