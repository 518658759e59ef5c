"""The list of all changes of a program between the trace and the compiler, in order.

Each pass is a file with its reason, its condition and its evidence. `jit(step, without=("name",))`, or the environment
variable FUNCAMP_WITHOUT, leaves some out; `jit(step, explain=True)` prints those that a program gets.
"""

from __future__ import annotations

from funcamp._jit.passes import (
    casts,
    convolutions,
    float16_sums,
    layouts,
    open_sizes,
    part_inputs,
    permutations,
    products,
    small_buffers,
    steps_in_cpp,
    tanh,
    unread_gathers,
    whole_operations,
    write_backs,
    zero_tensors,
)
from funcamp._jit.passes.program import Pass, Program
from funcamp._jit.passes.registry import registered

PIPELINE: tuple[Pass, ...] = (
    # Of the graph as it was traced.
    whole_operations.PASS,
    unread_gathers.PASS,
    casts.PASS,
    open_sizes.PASS,
    # Of what the compiler takes instead of some operations.
    zero_tensors.PASS,
    convolutions.PASS,
    float16_sums.PASS,
    tanh.PASS,
    # Of the graph again, given that table.
    layouts.PASS,
    permutations.PASS,
    part_inputs.PASS,
    # Inside Inductor, on the graph without writes.
    write_backs.PASS,
    # Inside Inductor, on the graph that it generates code for.
    products.PASS,
    # Of the C++ that Inductor has written.
    small_buffers.PASS,
    steps_in_cpp.PASS,
)


def pipeline() -> tuple[Pass, ...]:
    """Return all passes: those above, and those that layers have registered."""
    return (*PIPELINE, *registered())


def changed(program: Program, without: frozenset[str] = frozenset()) -> Program:
    """Return the program after all passes that its target needs, except those left out."""
    for program_pass in pipeline():
        if program_pass.where(program.target) and program_pass.name not in without:
            program = program_pass.run(program)
    return program
