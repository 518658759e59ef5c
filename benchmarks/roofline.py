"""Where does the time of a captured step go on a GPU, and where is the model of gpu_program.py wrong?

The step of gpu_program.py, captured and replayed. The time of a step is measured without a profiler; that of its
kernels in one profiled replay: calls of libraries (products, attention, convolutions), generated kernels, and copies
and fills. What is left of the step are the gaps between kernels. The model's numbers are those of the newest
gpu-program result file. Below the table, the kernels that take longest, to say what to tune.

    python benchmarks/roofline.py [--device cuda] [--rounds 9] [--sizes "MLP 134 M;..."] [--out DIR]
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from _models import PROGRAM_SIZES
from _timing import Variant, about, arguments, chosen, seconds, table, torch_variant, write
from _variants import funcamp_step

RESULTS = Path(__file__).parent / "results"
SHOWN = 12
#: The model's numbers by the part of a step that they are of.
MODEL = {
    "calls of libraries": "products_ms",
    "generated kernels": "memory_ms",
    "of them check and update": "of_it_check_and_update_ms",
    "gaps": "gaps_ms",
    "step": "step_ms",
}


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to, by its name in a profile."""
    if kernel.startswith("triton_"):
        return "generated kernels"
    return "copies and fills" if kernel.startswith(("Memcpy", "Memset")) else "calls of libraries"


def checks_or_updates(kernel: str) -> bool:
    """Whether a generated kernel reads gradients for the check and the norm, or applies AdamW."""
    return kernel.startswith("triton_") and ("lerp" in kernel or ("abs" in kernel and "sum" in kernel))


def kernels(variant: Variant, device: str) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel of one call; on a CPU, of every operation."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profile:
        variant.call()
        variant.wait()
    events = profile.events() or []
    if device == "cuda":
        events = [e for e in events if "CUDA" in str(e.device_type) and not e.name.startswith("##")]  # annotations
        return [(event.name, event.self_device_time_total / 1e3) for event in events]
    return [(event.name, event.self_cpu_time_total / 1e3) for event in events]


def parts(found: list[tuple[str, float]], step_ms: float) -> dict[str, float]:
    """Milliseconds of each part of a step."""
    spent = dict.fromkeys(("calls of libraries", "generated kernels"), 0.0)
    spent["of them check and update"] = sum(ms for name, ms in found if checks_or_updates(name))
    spent["copies and fills"] = 0.0
    for name, ms in found:
        spent[part_of(name)] += ms
    return {**spent, "gaps": step_ms - sum(ms for _, ms in found), "step": step_ms}


def by_time(found: list[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """Name, calls and milliseconds in all of every kernel, the longest first."""
    calls: dict[str, list[float]] = {}
    for name, ms in found:
        calls.setdefault(name, []).append(ms)
    rows = [(name[:100], len(times), round(sum(times), 3)) for name, times in calls.items()]
    return sorted(rows, key=lambda row: -row[2])


def modelled() -> dict[str, dict[str, Any]]:
    """The rows of the newest result file of gpu_program.py, by model."""
    newest = max(RESULTS.glob("*-gpu-program.json"))
    return {row["model"]: row for row in json.loads(newest.read_text())["results"]}


def main() -> None:
    """Measure, print, and write the result files where asked, anew after every model."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    model = modelled()
    rows: list[dict[str, Any]] = []
    longest: list[tuple[Any, ...]] = []
    for name, size in chosen(parser, args, PROGRAM_SIZES).items():
        variant = torch_variant(funcamp_step(size, args.device, dtype, max_norm=1.0), args.device)
        seconds(variant, 3)
        times = [seconds(variant, size.steps)[0] / size.steps for _ in range(args.rounds)]
        found = kernels(variant, args.device)
        for part, ms in parts(found, statistics.median(times) * 1e3).items():
            wanted = model[name].get(MODEL.get(part, ""), "")
            over = round(ms / wanted, 2) if wanted else ""
            rows.append({"size": name, "part": part, "ms": round(ms, 3), "model_ms": wanted, "over_model": over})
        longest += [(name, *row) for row in by_time(found)[:SHOWN]]
        del variant
        body = table(("model", "part", "ms", "model, ms", "measured over model"), [tuple(row.values()) for row in rows])
        body += ["", f"The {SHOWN} kernels that take longest:", "", *table(("model", "kernel", "calls", "ms"), longest)]
        facts = about(args.device, rounds=args.rounds, step="AdamW, max_norm, as in gpu_program.py")
        write(args.out, f"roofline-{args.device}", "A step's time by kernels, and the model of it", facts, body, rows)


if __name__ == "__main__":
    main()
