"""What is the program of a step on an H100, read without one, and how long should it take?

A model of its time: nothing here is measured.

    python benchmarks/gpu_program.py [--sizes "MLP 134 M;GPT 124 M"] [--out benchmarks/results]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import fake_cuda

fake_cuda.load()  # before torch is imported

import torch  # noqa: E402
from _models import PROGRAM_SIZES, Size, build, cross_entropy  # noqa: E402
from _timing import about, arguments, chosen, table, write  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import funcamp  # noqa: E402
from tests.support.gpu_program import Kernel, Program, program_of  # noqa: E402
from tests.support.ptxas import Compiled, compiled  # noqa: E402

#: How the program is read and what the model computes, for the result file.
METHOD = """\
The step is traced and compiled for CUDA with tensors without values; Triton and ptxas compile its kernels for sm_90.

    products = FLOPs of products and attention / (peak * share reached)
    memory = bytes that generated kernels read and write / (bandwidth * share reached)
    gaps = (generated kernels + calls of libraries) * time from one kernel's end to the next one's begin in a CUDA graph
    step = products + memory + gaps

Bytes are counted load by load and store by store, whatever the caches hold, and what a mask leaves out too. It leaves
out what products read and write where that takes longer than their arithmetic, and kernels too small to fill the GPU.
"""
PEAK = 989e12  # dense float16 FLOPs a second of an H100 SXM
PEAK_REACHED = 0.6  # by large products
BANDWIDTH = 3.35e12  # bytes a second
BANDWIDTH_REACHED = 0.9
GAP = 1.3e-6  # seconds
#: Kernels of each model in the table: those that move most.
SHOWN = 8


def program(size: Size) -> tuple[Program, int]:
    """A step's program, and the number of parameters."""
    stays = mock.patch.object(torch.nn.Module, "to", lambda model, *_: model)  # fake parameters cannot be moved
    with FakeTensorMode(allow_non_fake_inputs=True), stays:
        model, x, y = build(size, "cpu")
        adamw = funcamp.stateless(torch.optim.AdamW)
        step = funcamp.make_train_step(funcamp.module_loss(model, cross_entropy), adamw, policy="float16", max_norm=1.0)
        state = step.init()
    return program_of(step, state, (x, y)), sum(param.numel() for param in model.parameters())


def row(name: str, made: Program, parameters: int, kernels: dict[Kernel, Compiled]) -> dict[str, Any]:
    """One model."""
    calls = made.launches + sum(made.libraries.values())
    moved = sum(sum(kernel.traffic) * kernel.launches for kernel in kernels)
    # Kernels are distinct, and one that both checks and updates counts once.
    check_and_update = {*made.of("abs", "sum"), *made.of("lerp")}
    moved_by_these = sum(sum(kernel.traffic) * kernel.launches for kernel in check_and_update)
    products = made.flops / (PEAK * PEAK_REACHED)
    memory = moved / (BANDWIDTH * BANDWIDTH_REACHED)
    return {
        "model": name,
        "parameters": parameters,
        "launches": made.launches,
        "library_calls": sum(made.libraries.values()),
        "allocations": made.allocations,
        "kernels": len(kernels),
        "most_registers": max(one.registers for one in kernels.values()),
        "spilling": sum(one.spilled > 0 for one in kernels.values()),
        "gigabytes": round(moved / 1e9, 3),
        "check_and_update_bytes_a_parameter": round(moved_by_these / parameters, 2),
        "teraflops": round(made.flops / 1e12, 3),
        "products_ms": round(products * 1e3, 3),
        "memory_ms": round(memory * 1e3, 3),
        "of_it_check_and_update_ms": round(moved_by_these / (BANDWIDTH * BANDWIDTH_REACHED) * 1e3, 3),
        "gaps_ms": round(calls * GAP * 1e3, 3),
        "step_ms": round((products + memory + calls * GAP) * 1e3, 3),
    }


def largest_kernels(name: str, kernels: dict[Kernel, Compiled]) -> list[tuple[Any, ...]]:
    """Rows of the kernels that move most."""
    order = sorted(kernels, key=lambda kernel: -sum(kernel.traffic) * kernel.launches)[:SHOWN]
    rows = []
    for kernel in order:
        machine_code = kernels[kernel]
        read, written = kernel.traffic
        widths = sorted(machine_code.accesses.items(), reverse=True)
        row_of_kernel = (
            name,
            _short(kernel.name),
            kernel.launches,
            kernel.elements,
            f"{read / 1e6:.1f}",
            f"{written / 1e6:.1f}",
            machine_code.registers,
            machine_code.spilled,
            machine_code.shared,
            machine_code.warps,
            ", ".join(f"{count} of {size}" for size, count in widths),
        )
        rows.append(row_of_kernel)
    return rows


def _short(name: str) -> str:
    kind = name.removeprefix("triton_").split("_fused_", 1)[0]
    number = name.rsplit("_", 1)[1]
    parts = name.split("_fused_", 1)[1].rsplit("_", 1)[0]
    return f"{kind} {number}: {parts[:40]}{'...' * (len(parts) > 40)}"


def main() -> None:
    """Print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    rows = []
    largest = []
    for name, size in chosen(parser, args, PROGRAM_SIZES).items():
        made, parameters = program(size)
        kernels = {kernel: compiled(kernel) for kernel in made.kernels}
        rows.append(row(name, made, parameters, kernels))
        largest += largest_kernels(name, kernels)
    columns = (
        "model",
        "parameters",
        "launches",
        "calls of libraries",
        "allocations",
        "kernels",
        "registers, most",
        "kernels that spill",
        "GB read and written",
        "bytes a parameter, check and update",
        "TFLOP",
        "products, ms",
        "memory, ms",
        "of it check and update",
        "gaps, ms",
        "step, ms",
    )
    kernel_columns = (
        "model",
        "kernel",
        "launches",
        "elements",
        "MB read",
        "MB written",
        "registers",
        "bytes spilled",
        "shared bytes",
        "warps",
        "accesses, by bytes a thread",
    )
    method = [line.strip() for line in METHOD.splitlines()]
    facts = about(
        "cpu",
        step='AdamW, policy="float16", max_norm, one CUDA graph',
        GPU=f"H100 SXM: {PEAK / 1e12:.0f} TFLOP/s * {PEAK_REACHED}, {BANDWIDTH / 1e12} TB/s * {BANDWIDTH_REACHED}, "
        f"gap {GAP * 1e6} us",
        measured="nothing",
    )
    body = [*method, "", *table(columns, [tuple(one.values()) for one in rows])]
    body += ["", f"The {SHOWN} kernels of each model that move most, one launch:", "", *table(kernel_columns, largest)]
    write(args.out, "gpu-program", "The GPU's program of a step: a model", facts, body, rows)


if __name__ == "__main__":
    main()
