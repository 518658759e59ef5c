"""Small buffers of a program on a CPU are parts of one block of memory (`_jit/small_buffers.py`)."""

from __future__ import annotations

from funcamp._jit.passes.program import Pass, Program
from funcamp._jit.small_buffers import in_one_block


def _run(program: Program) -> Program:
    return program._replace(source_changes=(*program.source_changes, in_one_block))


PASS = Pass(
    name="small_buffers",
    why="a tensor for every value between two kernels takes a fifth of a small step's time",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and target.on_cpu,
    run=_run,
)
