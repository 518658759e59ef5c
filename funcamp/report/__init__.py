"""The report: the mistakes of a training loop, and the numbers of one of its steps.

`python -m funcamp report train.py` runs a script and reports both. It knows torch and no other part of this package but
the counts of `funcamp.numerics`, so it also watches loops that do not use funcamp.

An `Observer` replaces functions of torch, and handlers (`calls/`) turn their calls into events (`events.py`). A `Loop`
is the state machine that follows the events (`loop.py`). Each mistake is a rule (`rules/`): a function of one event and
of the loop's state before it. `audit.py` puts them together. `numbers/` records one step operation by operation.
ARCHITECTURE.md says how to add a rule.
"""

from funcamp.report.numbers.float8_fit import Float8Layer
from funcamp.report.numbers.operation import Operation
from funcamp.report.numbers.origin import Origin
from funcamp.report.numbers.plot import plot_flushed
from funcamp.report.numbers.recommendation import Recommendation
from funcamp.report.numbers.render import annotate
from funcamp.report.numbers.report import NumericsReport, numerics_report

__all__ = [
    "Float8Layer",
    "NumericsReport",
    "Operation",
    "Origin",
    "Recommendation",
    "annotate",
    "numerics_report",
    "plot_flushed",
]
