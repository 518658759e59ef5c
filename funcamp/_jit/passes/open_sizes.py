"""Check what a trace assumed of sizes that follow from values, such as that of `logits[mask]`: open sizes.

A trace is made for sizes that are equal to each other where tensors meet, and not 1. If a call selects a single row,
eager code would repeat it, and sum its gradients; the program raises an error instead. torch has the assumptions of the
trace, and a pass that makes operations of them, as Inductor does for programs that it compiles.
"""

from __future__ import annotations

from typing import Any

from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

from funcamp._jit.passes.program import Pass, Program


def check_open_sizes(program: Program) -> Program:
    """Return a program that checks its open sizes."""
    mode: Any = program.mode
    insert_deferred_runtime_asserts(program.module, mode.shape_env, "open_sizes")
    return program


PASS = Pass(
    name="open_sizes",
    why="a trace assumes that sizes which follow from values are equal where tensors meet, and not 1",
    evidence="tests/jit/test_open_shapes.py",
    where=lambda target: target.is_open and target.backend == "eager",
    run=check_open_sizes,
)
