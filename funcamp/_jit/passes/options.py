"""Inductor's options as passes: each with its reason and its condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.program import NARROW, Pass, Program, Target

#: Number of elements of a tensor above which a program is bound by memory and products, not by the number of kernels.
#: Inductor would join a kernel of 4 million elements and a tiny one, too; that was not measured to gain.
LARGE = 2**22


def option(
    values: dict[str, Any],
    why: str,
    evidence: str,
    where: Callable[[Target], bool] = lambda _: True,
    of_program: Callable[[Program], bool] = lambda _: True,
    *,
    may_fail: bool = False,
    defect: bool = False,
) -> Pass:
    """Return the pass that sets one of Inductor's options, or options that belong together.

    Args:
        values: by name; the first name is that of the pass.
        why: see `Pass`.
        evidence: see `Pass`.
        where: whether a program for this target needs it.
        of_program: whether a program for such a target needs it.
        may_fail: whether Inductor may not compile a program with it.
        defect: see `Pass`.
    """
    name = next(iter(values))

    def run(program: Program) -> Program:
        if not of_program(program):
            return program
        names_that_may_fail = (*program.may_fail, name) if may_fail else program.may_fail
        return program._replace(options={**program.options, **values}, may_fail=names_that_may_fail)

    return Pass(name, why, evidence, lambda target: target.by_inductor and where(target), run, defect)


def _has_attention(program: Program) -> bool:
    return any("attention" in str(node.target) for node in program.module.graph.nodes if node.op == "call_function")


def _has_16_bits(program: Program) -> bool:
    values = [node.meta.get("val") for node in program.module.graph.nodes]
    return any(value.dtype in NARROW for value in values if isinstance(value, Tensor))


def _is_small(program: Program) -> bool:
    values = [node.meta.get("val") for node in program.module.graph.nodes]
    return all(value.numel() < LARGE for value in values if isinstance(value, Tensor))


def _with_present_threads(program: Program) -> Program:
    return program._replace(options={**program.options, "cpp.threads": torch.get_num_threads()})


OPTIONS: tuple[Pass, ...] = (
    # Inductor writes arrays of as many parts as there are threads now; without the option, more threads later write
    # beyond their end.
    Pass(
        name="cpp.threads",
        why="a program for a CPU uses the number of threads for which it was compiled, also if there are more later",
        evidence="tests/jit/test_threads.py",
        where=lambda target: target.by_inductor,
        run=_with_present_threads,
        defect=True,
    ),
    option(
        {"triton.cudagraphs": False},
        why="jit captures the whole step itself",
        evidence="tests/jit/test_capture.py",
        where=lambda target: "cuda" in target.devices,
    ),
    option(
        {"allow_buffer_reuse": False},
        # On an H100 with torch 2.11: "Pointer argument (at 20) cannot be accessed from Triton (cpu tensor?)". In a
        # captured step this costs nothing: the allocator of the graph's pool gives the memory to another buffer too.
        why="the seeds of attention may be on the host, so their memory must not become that of a tensor on the GPU",
        evidence="tests/cuda/test_jit_cuda.py",
        where=lambda target: "cuda" in target.devices,
        of_program=_has_attention,
    ),
    option(
        {"combo_kernels": True},
        # The smallest step takes 0.85 of its time on an H100.
        why="small kernels that do not depend on each other become one: each takes 2 us, however little it does",
        evidence="benchmarks/results/2026-11-27-step-cuda-combined.md",
        where=lambda target: "cuda" in target.devices and not target.is_open,
        of_program=_is_small,
    ),
    option(
        {"emulate_precision_casts": True},
        # Else the next operation in the loop reads the value before rounding, and all others the rounded one. The
        # backward pass of a maximum then finds no element that equals it. Float32 programs are as without it, except
        # that Triton would not fuse multiplications and additions.
        # It takes a tenth of a bfloat16 step on a CPU. No smaller condition was found: compensated sums, probabilities
        # of a Categorical, and norms of constant rows need it, and no operation in them tells.
        why="fused operations round in between as eager ones do, so that all operations read one value of a tensor",
        evidence="tests/jit/test_rounded_values.py",
        of_program=_has_16_bits,
        defect=True,
    ),
    option(
        {"fallback_random": True},
        why="exact=True: a program draws eager mode's random numbers",
        evidence="tests/jit/test_dropout.py",
        where=lambda target: target.exact,
    ),
)
