"""Inductor's options for a CPU."""

from __future__ import annotations

from funcamp._jit.passes.options import option
from funcamp._jit.passes.program import Pass, Program

#: Number of operations above which the C++ that calls the kernels gets a separate file. The compile time of one file
#: grows faster than linearly (128 s instead of 85 at 48 blocks, 3,300 operations); with two, small steps are slower
#: (0.75 ms instead of 0.52). The calling code is then not optimized: it compiles in 5 s instead of 43, and 3,000 calls
#: take the same time.
LONG = 1500


def _is_long(program: Program) -> bool:
    operations = [node for node in program.module.graph.nodes if node.op == "call_function"]
    return len(operations) > LONG


# Not aot_inductor.allow_stack_allocation, which does what the pass small_buffers does: with torch 2.13 some programs
# end the process and others return wrong numbers (a frozen teacher's).
OPTIONS: tuple[Pass, ...] = (
    option(
        {"layout_optimization": False},
        # With channels last, a step of ResNet-18 takes 1.2 to 1.4 times as long, because weights and gradients, which
        # are in the state's layout, would be reordered.
        why="convolutions on a CPU have the layouts of eager mode",
        evidence="benchmarks/passes.py",
        where=lambda target: target.on_cpu,
    ),
    option(
        {"cpp_wrapper": True},
        why="C++ calls the kernels: a tenth of a small step is Python's time",
        evidence="benchmarks/passes.py",
        where=lambda target: target.on_cpu,
        may_fail=True,  # Python may be able to call what C++ cannot; else its error is the familiar one
    ),
    option(
        {"cpp.min_chunk_size": 8192},
        # Inductor's 512 elements take less time than a second thread needs to begin.
        why="short loops are not shared among threads",
        evidence="benchmarks/passes.py",
        where=lambda target: target.on_cpu and not target.exact,
    ),
    option(
        {"cpp_wrapper_build_separate": True, "aot_inductor.compile_wrapper_opt_level": "O0"},
        why="the C++ that calls the kernels of a long program is a separate file, and not optimized",
        evidence="benchmarks/passes.py",
        where=lambda target: target.on_cpu,
        of_program=_is_long,
    ),
)
