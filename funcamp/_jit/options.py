"""Inductor's options, as data: each with its reason and its condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._jit.passes.program import Program, Target

#: Number of operations above which the C++ that calls the kernels gets a separate file. The compile time of one file
#: grows faster than linearly (128 s instead of 85 at 48 blocks, 3,300 operations); with two, small steps are slower
#: (0.75 ms instead of 0.52). The calling code is then not optimized: it compiles in 5 s instead of 43, and 3,000 calls
#: take the same time.
LONG = 1500

#: Number of elements of a tensor above which a program is bound by memory and products, not by the number of kernels.
#: Inductor would join a kernel of 4 million elements and a tiny one, too; that was not measured to gain.
LARGE = 2**22

_ROUNDED = (torch.float16, torch.bfloat16)


class Option(NamedTuple):
    """One of Inductor's options."""

    names: tuple[str, ...]
    """Its name; or the names of options that belong together."""
    values: tuple[Any, ...]
    why: str
    where: Callable[[Target], bool]
    of_program: Callable[[Program], bool] = lambda _: True
    """Whether a program on such a target needs it; looked at after `where`."""


def _is_long(program: Program) -> bool:
    operations = [node for node in program.module.graph.nodes if node.op == "call_function"]
    return len(operations) > LONG


def _has_attention(program: Program) -> bool:
    return any("attention" in str(node.target) for node in program.module.graph.nodes if node.op == "call_function")


def _has_16_bits(program: Program) -> bool:
    for graph in program.graphs():
        values = [node.meta.get("val") for node in graph.nodes]
        if any(value.dtype in _ROUNDED for value in values if isinstance(value, Tensor)):
            return True
    return False


def _is_small(program: Program) -> bool:
    values = [node.meta.get("val") for node in program.module.graph.nodes]
    return all(value.numel() < LARGE for value in values if isinstance(value, Tensor))


# Not aot_inductor.allow_stack_allocation, which does what the pass small_buffers does: with torch 2.13 some programs
# end the process and others return wrong numbers (a frozen teacher's).
# Not memory_planning, one block of memory for a step: the C library returns a large block to the system after each
# step, and its pages fault in again at the next (benchmarks/passes.py: Mixer 1.02 of eager's time instead of 0.94,
# ResNet-18 1.05 instead of 0.82; small steps take the same time).
OPTIONS: tuple[Option, ...] = (
    Option(
        names=("triton.cudagraphs",),
        values=(False,),
        why="jit captures the whole step itself",
        where=lambda _: True,
    ),
    Option(
        names=("allow_buffer_reuse",),
        values=(False,),
        # On an H100 with torch 2.11: "Pointer argument (at 20) cannot be accessed from Triton (cpu tensor?)". In a
        # captured step this costs nothing: the allocator of the graph's pool gives the memory to another buffer too.
        why="the seeds of attention may be on the host, so their memory must not become that of a tensor on the GPU",
        where=lambda target: "cuda" in target.devices,
        of_program=_has_attention,
    ),
    Option(
        names=("combo_kernels",),
        values=(True,),
        # The smallest step takes 0.85 of its time on an H100 (results/2026-11-27-step-cuda-combined.md).
        why="small kernels that do not depend on each other become one: each takes 2 us, however little it does",
        where=lambda target: "cuda" in target.devices and not target.is_open,
        of_program=_is_small,
    ),
    Option(
        names=("reorder_for_compute_comm_overlap", "reorder_for_compute_comm_overlap_passes"),
        values=(True, ["raise_comms", "sink_waits"]),
        why="collectives start as soon as their inputs are ready, and are waited for as late as possible",
        where=lambda target: target.is_distributed,
    ),
    Option(
        names=("emulate_precision_casts",),
        values=(True,),
        # Else the next operation in the loop reads the value before rounding, and all others the rounded one. The
        # backward pass of a maximum then finds no element that equals it. Float32 programs are as without it, except
        # that Triton would not fuse multiplications and additions.
        why="fused operations round in between as eager ones do, so that all operations read one value of a tensor",
        where=lambda _: True,
        of_program=_has_16_bits,
    ),
    Option(
        names=("fallback_random",),
        values=(True,),
        why="exact=True: a program draws eager mode's random numbers",
        where=lambda target: target.exact,
    ),
    Option(
        names=("layout_optimization",),
        values=(False,),
        # With channels last, a step of ResNet-18 takes 1.2 to 1.4 times as long, because weights and gradients, which
        # are in the state's layout, would be reordered.
        why="convolutions on a CPU have the layouts of eager mode",
        where=lambda target: target.on_cpu,
    ),
    Option(
        names=("cpp_wrapper",),
        values=(True,),
        why="C++ calls the kernels: a tenth of a small step is Python's time",
        where=lambda target: target.on_cpu,
    ),
    Option(
        names=("cpp.min_chunk_size",),
        values=(8192,),
        # Inductor's 512 elements take less time than a second thread needs to begin.
        why="short loops are not shared among threads",
        where=lambda target: target.on_cpu and not target.exact,
    ),
    Option(
        names=("cpp_wrapper_build_separate", "aot_inductor.compile_wrapper_opt_level"),
        values=(True, "O0"),
        why="the C++ that calls the kernels of a long program is a separate file, and not optimized",
        where=lambda target: target.on_cpu,
        of_program=_is_long,
    ),
)


def options_for(program: Program, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return Inductor's options for a program, except those left out by name."""
    options: dict[str, Any] = {}
    for option in OPTIONS:
        if option.names[0] in without or not option.where(program.target):
            continue
        if option.of_program(program):
            options |= dict(zip(option.names, option.values))
    return options
