"""Inductor's options as passes: each with its reason and its condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Pass, Program, Target
from funcamp._trace.aliases import Aliases

#: Number of elements of a tensor above which a program is bound by memory and products, not by the number of kernels.
#: Inductor would join a kernel of 4 million elements and a tiny one, too; that was not measured to gain.
LARGE = 2**22

_aten = torch.ops.aten
#: In eager mode the results of these are inputs, or whole numbers, or follow from all digits of an input.
_EXACT = frozenset(
    getattr(_aten, name)
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("amax", "amin", "aminmax", "max", "min", "maximum", "minimum", "fmax", "fmin", "cummax", "cummin"),
        *("argmax", "argmin", "sort", "topk", "kthvalue", "median", "nanmedian", "mode", "linalg_vector_norm", "norm"),
        *("floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "floor_divide"),
    )
)


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


def _needs_rounding(program: Program) -> bool:
    """Return whether operations in 16 bits must read rounded values, also of those that are in no memory.

    Inductor computes such a value again for each operation, in float32. On a CPU all of them so read one value, and in
    bfloat16 it may have more digits than in eager mode: rounding takes a tenth of a step. But the largest of them is
    then no longer one of them, a bin may be another, and float16 must overflow.
    """
    always = program.target.exact or not program.target.on_cpu
    for graph in program.graphs():
        aliases = Aliases(graph)
        for node in graph.nodes:
            dtypes = {_dtype_of(part) for part in (node, *node.all_input_nodes)}
            if torch.float16 in dtypes:
                return True
            if torch.bfloat16 in dtypes and (always or _is_exact(node, aliases)):
                return True
    return False


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _is_exact(node: fx.Node, aliases: Aliases) -> bool:
    """Return whether an operation in bfloat16 depends on all digits: it compares, or rounds, or returns an input."""
    if node.target is not _aten._to_copy.default:
        return getattr(node.target, "overloadpacket", None) in _EXACT
    if not node.meta["val"].dtype.is_floating_point:
        return True
    # x.bfloat16().float() is the rounded x.
    copied: Any = node.args[0]
    source = aliases.root[copied]
    return source.target is _aten._to_copy.default and _dtype_of(source) == torch.bfloat16 != _dtype_of(node)


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
        # Else the backward pass of a maximum finds no element that equals it. Triton's kernels read values before
        # rounding that others read rounded, so on a GPU all programs in 16 bits round.
        why="operations round in between as eager ones do: in float16, and where the largest or the same is looked for",
        evidence="tests/jit/test_rounded_values.py",
        of_program=_needs_rounding,
        defect=True,
    ),
    option(
        {"fallback_random": True},
        why="exact=True: a program draws eager mode's random numbers",
        evidence="tests/jit/test_dropout.py",
        where=lambda target: target.exact,
    ),
)
