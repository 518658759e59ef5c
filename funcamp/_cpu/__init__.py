"""What makes compiled steps faster on a CPU: passes of `jit`, which `funcamp/__init__.py` registers.

Without them every step runs, and is right. Each brings 5 % of a step, or of a first call, on some public model or
reinforcement learner (docs/performance.md, What each trick brings).
"""

from __future__ import annotations

from funcamp._cpu import convolutions, headers, kept_memory, part_inputs, products, small_buffers, steps_in_cpp, tanh
from funcamp._cpu.options import OPTIONS
from funcamp._jit.passes.program import Pass

PASSES: tuple[Pass, ...] = (
    # Of what the compiler takes instead of some operations.
    convolutions.PASS,
    tanh.PASS,
    # Of the graph.
    part_inputs.PASS,
    # Inside Inductor, on the graph that it generates code for.
    products.PASS,
    *OPTIONS,
    # Of the C++ that Inductor has written; the last one changes it first.
    steps_in_cpp.PASS,
    kept_memory.PASS,
    small_buffers.PASS,
    headers.PASS,
)
