"""What does it cost a compiled step to count what every layer holds, forward and backward?

The same step with and without `numerics.track_scales`, interleaved in one process; every element counted, and a sample
of each tensor. Reported: the time over the plain step's within each round, and how many numbers a step counts.

    python benchmarks/track.py [--device cuda] [--rounds 9] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _timing import Variant, about, arguments, interleaved, seconds, table, torch_variant, write
from _variants import funcamp_step

import funcamp
from funcamp import numerics

Change = Callable[[funcamp.ModuleLoss], funcamp.ModuleLoss]
KINDS: dict[str, Change] = {
    "plain": lambda loss_fn: loss_fn,
    "tracked, every element": lambda loss_fn: numerics.track_scales(loss_fn, sample=None),
    "tracked, 4,096 of each tensor": lambda loss_fn: numerics.track_scales(loss_fn, sample=4096),
}


def variant(size: Size, device: str, dtype: torch.dtype, change: Change) -> tuple[Variant, Any]:
    """A step, and the metrics of a first call."""
    call = funcamp_step(size, device, dtype, change=change)
    return torch_variant(call, device), call()


def measure(name: str, size: Size, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a variant."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    made = {label: variant(size, device, dtype, change) for label, change in KINDS.items()}
    for one, _ in made.values():
        seconds(one, 2)
    timings = interleaved({label: one for label, (one, _) in made.items()}, size.steps, rounds)
    counted = {
        label: int(sum((r.forward.count + r.backward.count).item() for r in metrics.records.values()))
        for label, (_, metrics) in made.items()
    }
    torch._dynamo.reset()
    gc.collect()
    return [
        {
            "size": name,
            "variant": label,
            "median_ms": round(timing.quartiles[1], 3),
            "quartiles_ms": [round(timing.quartiles[0], 3), round(timing.quartiles[2], 3)],
            "ratio_to_plain": round(timing.ratio, 3),
            "counted": counted[label],
        }
        for label, timing in timings.items()
    ]


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", help="names, separated by semicolons")
    args = parser.parse_args()
    known = GPU_SIZES if args.device == "cuda" else CPU_SIZES
    default = [name for name in known if "MLP" in name or "GPT" in name]
    rows: list[dict[str, Any]] = []
    for name in args.sizes.split(";") if args.sizes else default:
        rows += measure(name, known[name], args.device, args.rounds)
    cells = [
        (
            *(row["size"], row["variant"], row["median_ms"], " to ".join(map(str, row["quartiles_ms"]))),
            *(row["ratio_to_plain"], row["counted"]),
        )
        for row in rows
    ]
    columns = ("model", "variant", "median ms", "quartiles ms", "time over plain", "numbers counted")
    facts = about(args.device, rounds=args.rounds)
    write(args.out, f"track-{args.device}", "Counting what every layer holds", facts, table(columns, cells), rows)


if __name__ == "__main__":
    main()
