"""How long does a step compile as its model grows, and how much memory does it take, against torch's loop?

The loop is eager, or has a compiled model.

Compile time: first calls of a GPT of width 64, each in a process of its own with an empty cache, and again with the
cache that the first one left, as a second start of the same program. Memory: bytes a parameter, the module's among
them, counted tensor by tensor, and measured: the most that live at once while the model and its state are made and
during the third step, of all that torch's allocator has handed out since before; and the most that is resident during
the sixth step, above what the process had after a step of a small model (malloc keeps some of what is freed).

    python benchmarks/footprint.py [--sizes "4 blocks;12 blocks"] [--out DIR]
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _models import CPU_SIZES, Size, build, cross_entropy
from _timing import about, arguments, chosen, in_fresh_processes, kilobytes, save, table, write
from _variants import funcamp_step, torch_loop
from torch.utils import _pytree

import funcamp
from funcamp._step.micro_batch import result_function
from funcamp._step.shares import Shares

LOW = torch.bfloat16
LARGE = CPU_SIZES["MLP 38 M"]

STEPS: dict[str, Callable[[Size], Callable[[], Any]]] = {
    "torch.compile(model) in torch's loop": lambda size: torch_loop(size, "cpu", LOW, mode="default"),
    "funcamp.jit": lambda size: funcamp_step(size, "cpu", LOW),
    "funcamp.jit, consume=False": lambda size: funcamp_step(size, "cpu", LOW, consume=False),
    "funcamp.jit, donate=False": lambda size: funcamp_step(size, "cpu", LOW, donate=False),
    "torch eager": lambda size: torch_loop(size, "cpu", LOW),
}
COMPILED = list(STEPS)[:2]
SIZES = {"4 blocks": 4, "12 blocks": 12, "48 blocks": 48}


def peaks_of(make: Callable[[], Callable[[], Any]]) -> tuple[int, int]:
    """The most bytes that live at once in make and in the third call, of those that torch handed out since make's."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run = make()
        with torch.profiler.record_function("made"):
            run()
        run()
        with torch.profiler.record_function("third"):
            run()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    made = next(event.start_ns() for event in events if event.name() == "made")
    third = next(event.start_ns() for event in events if event.name() == "third")
    live = 0
    highest_while_made = 0
    highest_in_third = 0
    for event in events:
        if event.name() != "[memory]":
            continue
        live += event.nbytes()
        if event.start_ns() < made:
            highest_while_made = max(highest_while_made, live)
        if event.start_ns() >= third:
            highest_in_third = max(highest_in_third, live)
    return highest_while_made, highest_in_third


def resident_of(make: Callable[[Size], Callable[[], Any]]) -> int:
    """The most bytes that are resident in the sixth call, beyond those after steps of a small model; Linux."""
    small = make(CPU_SIZES["MLP 0.14 M"])  # imports, and the compiler's memory
    small()
    small()
    del small
    gc.collect()
    before = kilobytes("VmRSS")
    run = make(LARGE)
    for _ in range(5):
        run()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    run()
    return 1024 * (kilobytes("VmHWM") - before)


def child(what: str, variant: str, blocks: str) -> tuple[float, ...]:
    """One measurement, in this process: seconds of the first call, bytes at the peaks, or those that are resident."""
    if what == "memory":
        return peaks_of(lambda: STEPS[variant](LARGE))
    if what == "resident":
        return (resident_of(STEPS[variant]),)
    run = STEPS[variant](Size("gpt", int(blocks), 64, 2, 64))
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start,)


def spawn(*arguments: str, times: int = 1) -> list[float]:
    """The measurements, so many times, each in a fresh process."""
    return [number for out in in_fresh_processes(__file__, ["--child", *arguments], times) for number in out]


def counted() -> tuple[dict[str, dict[str, float]], int]:
    """Bytes a parameter, tensor by tensor, of the state and of a step's gradients; the number of parameters."""

    def size(tree: Any) -> float:
        leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return round(sum(leaf.nbytes for leaf in leaves) / count, 2)

    model, x, y = build(LARGE, "cpu")
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast("cpu", LOW):
        loss = cross_entropy(model(x), y)
    torch.amp.GradScaler("cpu").scale(loss).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    eager = {
        "parameters": size(list(model.parameters())),
        "moments": size([list(state.values()) for state in optimizer.state.values()]),
        "copies": 0.0,
        "gradients": size([p.grad for p in model.parameters()]),
    }
    step = funcamp.make_train_step(
        funcamp.module_loss(model, cross_entropy), funcamp.stateless(torch.optim.AdamW), policy="bfloat16"
    )
    state = step.init()
    result = result_function(step, state, state.params, (), Shares(1.0, 1), LOW)(state.buffers, (x, y), None)
    flat = {
        "parameters": size(state.params),
        "moments": size(state.opt_state),
        "copies": 0.0,
        "gradients": size(result.gradients),
    }
    return {"eager": eager, "funcamp, flat": flat}, count


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--child", nargs=3, help="what, variant and blocks: one measurement")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*args.child)))
        return
    first: dict[str, dict[str, list[float]]] = {}
    rows: list[Any] = []
    held: dict[str, dict[str, float]] = {}
    peaks: dict[str, list[float]] = {}

    def write_results(keep: Callable[..., Path | None] = save) -> None:
        """Write all that is known by now; `keep` prints it too, or does not."""
        body = [
            *table(
                ("blocks", "first call", "s, cold", "over torch.compile(model)", "s, compiled artifacts kept"), rows
            ),
            "",
            *table(
                ("bytes a parameter, 38 M, AdamW", "parameters", "moments", "copies", "gradients", "all"),
                [(name, *v.values(), f"{sum(v.values()):.2f}") for name, v in held.items()],
            ),
            "",
            *table(
                ("bytes a parameter at the peak, batch 64", "while it is made", "of a step", "of a step, resident"),
                [(name, *values) for name, values in peaks.items()],
            ),
        ]
        numbers = {"first_call_s": first, "bytes_a_parameter": held, "peak_bytes_a_parameter": peaks}
        keep(args.out, "footprint-cpu", "Compile time and memory of a training step", facts, body, numbers)

    facts = about("cpu")
    for size, blocks in chosen(parser, args, SIZES).items():
        first[size] = {}
        for name in COMPILED:
            seconds_cold_and_warm = spawn("compile", name, str(blocks), times=2)
            first[size][name] = [round(seconds, 1) for seconds in seconds_cold_and_warm]
        base = first[size][COMPILED[0]][0]
        rows += [(blocks, name, cold, round(cold / base, 2), warm) for name, (cold, warm) in first[size].items()]
        write_results()
    held, count = counted()
    for name in STEPS:
        found = [*spawn("memory", name, "0"), *spawn("resident", name, "0")]
        peaks[name] = [round(value / count, 2) for value in found]
        write_results()
    write_results(write)


if __name__ == "__main__":
    main()
