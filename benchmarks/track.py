"""What does it cost a compiled step to count what every layer holds, forward and backward?

The same step with and without `numerics.track_scales`, interleaved in one process; every element counted, and
samples of each tensor. Where a step's buffers come to lie in memory makes two of the same differ by some percent: each
is built several times over. Reported: the mean of their medians, over that of the plain steps; the same of each alone;
what the first call took, with nothing in Inductor's cache; and how many numbers a step counts.

    python benchmarks/track.py [--device cuda] [--rounds 9] [--copies 3] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _timing import Variant, about, arguments, interleaved, seconds, table, torch_variant, write
from _variants import funcamp_step

from funcamp import numerics
from funcamp._autograd.module_loss import ModuleLoss

Change = Callable[[ModuleLoss], ModuleLoss]
KINDS: dict[str, Change] = {
    "plain": lambda loss_fn: loss_fn,
    "tracked, every element": lambda loss_fn: numerics.track_scales(loss_fn, sample=None),
    "tracked, 4,096 of each tensor": lambda loss_fn: numerics.track_scales(loss_fn, sample=4096),
    "tracked, 1,024 of each tensor": lambda loss_fn: numerics.track_scales(loss_fn, sample=1024),
}


def variant(size: Size, device: str, dtype: torch.dtype, change: Change) -> tuple[Variant, Any, float]:
    """A step, the metrics of a first call, and how long that took."""
    start = time.perf_counter()
    call = funcamp_step(size, device, dtype, change=change)
    metrics = call()
    return torch_variant(call, device), metrics, time.perf_counter() - start


def measure(name: str, size: Size, device: str, rounds: int, copies: int) -> list[dict[str, Any]]:
    """One row a kind."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        made = {label: [variant(size, device, dtype, change) for _ in range(copies)] for label, change in KINDS.items()}
    variants = {f"{label} {index}": one for label, all_of in made.items() for index, (one, *_) in enumerate(all_of)}
    for one in variants.values():
        seconds(one, 2)
    timings = interleaved(variants, size.steps, rounds)
    medians = {label: [timings[f"{label} {index}"].quartiles[1] for index in range(copies)] for label in KINDS}
    base = statistics.mean(medians["plain"])
    counted = {
        label: int(sum((r.forward.count + r.backward.count).item() for r in all_of[0][1].records.values()))
        for label, all_of in made.items()
    }
    torch._dynamo.reset()
    gc.collect()
    return [
        {
            "size": name,
            "variant": label,
            "median_ms": round(statistics.mean(medians[label]), 3),
            "ratio_to_plain": round(statistics.mean(medians[label]) / base, 3),
            "ratio_of_each": sorted(round(median / base, 3) for median in medians[label]),
            "first_call_s": round(made[label][0][2], 1),
            "counted": counted[label],
        }
        for label in KINDS
    ]


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--sizes", help="names, separated by semicolons")
    args = parser.parse_args()
    known = GPU_SIZES if args.device == "cuda" else CPU_SIZES
    default = [name for name in known if "MLP" in name or "GPT" in name]
    rows: list[dict[str, Any]] = []
    for name in args.sizes.split(";") if args.sizes else default:
        rows += measure(name, known[name], args.device, args.rounds, args.copies)
    cells = [
        (
            *(row["size"], row["variant"], row["median_ms"], row["ratio_to_plain"]),
            *(", ".join(map(str, row["ratio_of_each"])), row["first_call_s"], row["counted"]),
        )
        for row in rows
    ]
    columns = ("model", "variant", "median ms", "time over plain", "of each", "first call s", "numbers counted")
    facts = about(args.device, rounds=args.rounds, copies=args.copies)
    write(args.out, f"track-{args.device}", "Counting what every layer holds", facts, table(columns, cells), rows)


if __name__ == "__main__":
    main()
