"""Passes of `jit` for steps on several ranks."""

from __future__ import annotations

from funcamp._jit.passes.options import option
from funcamp._jit.passes.program import Pass

PASSES: tuple[Pass, ...] = (
    option(
        {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
        },
        why="collectives start as soon as their inputs are ready, and are waited for as late as possible",
        evidence="tests/distributed",
        where=lambda target: target.is_distributed,
    ),
)
