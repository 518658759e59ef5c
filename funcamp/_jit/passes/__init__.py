"""The list of all changes of a program between the trace and the compiler, in order.

Here are those that make programs right, and those that every program needs. Layers register others: `_cpu` those that
make programs faster on a CPU, `distributed` those for several ranks. Each pass is a file with its reason, its condition
and its evidence. `jit(step, without=("name",))` leaves some out; `jit(step, explain=True)` prints those that a
program gets.
"""

from __future__ import annotations

from funcamp import _layers
from funcamp._jit.passes import (
    batch_norms,
    casts,
    float16_sums,
    nan_gradients,
    open_sizes,
    scalar_factors,
    views,
    whole_operations,
    write_backs,
    zero_tensors,
)
from funcamp._jit.passes.options import OPTIONS
from funcamp._jit.passes.program import Pass, Program, Target
from funcamp._upstream.bugs import BUGS, Bug


def _corrected(bug: Bug) -> Pass:
    """Return the pass that compiles a program with torch changed."""

    def run(program: Program) -> Program:
        return program._replace(while_compiled=(*program.while_compiled, bug.changed))

    def where(target: Target) -> bool:
        return target.by_inductor and bug.present

    return Pass(bug.name, bug.why, bug.evidence, where, run, defect=True)


BEFORE_LAYERS: tuple[Pass, ...] = (
    # Of torch, while the program is compiled.
    *(_corrected(bug) for bug in BUGS),
    # Of the graph as it was traced.
    whole_operations.PASS,
    open_sizes.PASS,
)
#: What corrects the program that layers have made faster.
AFTER_LAYERS: tuple[Pass, ...] = (
    # Of what layers have left in groups of parameters.
    casts.PASS,
    # Of what the compiler takes instead of some operations.
    zero_tensors.PASS,
    scalar_factors.PASS,
    nan_gradients.PASS,
    float16_sums.PASS,
    batch_norms.PASS,
    # Of the graph again, given that table.
    views.PASS,
    # Inside Inductor, on the graph without writes.
    write_backs.PASS,
    *OPTIONS,
)


def pipeline() -> tuple[Pass, ...]:
    """Return all passes, in order."""
    return (*BEFORE_LAYERS, *_layers.passes_of_layers(), *AFTER_LAYERS)


def run_passes(program: Program, without: frozenset[str] = frozenset()) -> Program:
    """Return the program after all passes that its target needs, except those left out.

    Raises:
        RuntimeError: a pass raised; it is named, so that it can be left out.
    """
    for program_pass in pipeline():
        if program_pass.where(program.target) and program_pass.name not in without:
            try:
                program = program_pass.run(program)
            except Exception as error:
                raise RuntimeError(f"pass {program_pass.name!r} raises {type(error).__name__}: {error}") from error
    return program
