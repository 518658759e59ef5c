"""What does it cost a compiled step to count what every layer holds, forward and backward?

The same step with and without `numerics.track_scales`, interleaved in one process; every element counted, and
samples of each tensor. Where a step's buffers come to lie in memory makes two of the same differ by some percent: each
is built several times over. Reported: the mean of their medians, over that of the plain steps; the same of each alone;
what the first call took, with nothing in Inductor's cache; and how many numbers a step counts.

    python benchmarks/track.py [--device cuda] [--rounds 9] [--copies 3] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _timing import Report, Row, Variant, about, arguments, chosen, measured, torch_variant
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


def counted(tracked: Variant) -> Row:
    """How many numbers a step counts."""
    records = tracked.call().records.values()
    count = sum((record.forward.count + record.backward.count).item() for record in records)
    return {"counted": int(count)}


def measure(name: str, size: Size, device: str, rounds: int, copies: int) -> Iterator[Row]:
    """One row a kind, of the rows of its copies."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    def made(change: Change) -> Variant:
        return torch_variant(funcamp_step(size, device, dtype, change=change), device)

    makers = {
        f"{label} {index}": functools.partial(made, change)
        for label, change in KINDS.items()
        for index in range(copies)
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=folder):
        rows = {row["variant"]: row for row in measured(name, makers, size.steps, rounds, device, counted)}
    base = 0.0
    for label in KINDS:
        rows_of_copies = [rows[f"{label} {index}"] for index in range(copies)]
        row: Row = {"size": name, "variant": label}
        if failures := [copy["failed"] for copy in rows_of_copies if "failed" in copy]:
            yield row | {"failed": failures[0]}
            continue
        medians = [copy["median_ms"] for copy in rows_of_copies]
        row["median_ms"] = round(statistics.mean(medians), 3)
        row["counted"] = rows_of_copies[0]["counted"]
        base = base or row["median_ms"]
        row["ratio_to_plain"] = round(row["median_ms"] / base, 3)
        row["ratio_of_each"] = ", ".join(str(round(median / base, 3)) for median in sorted(medians))
        yield row | {"first_call_s": rows_of_copies[0]["first_call_s"]}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--copies", type=int, default=3)
    args = parser.parse_args()
    known = GPU_SIZES if args.device == "cuda" else CPU_SIZES
    columns = {
        "model": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "time over plain": "ratio_to_plain",
        "of each": "ratio_of_each",
        "first call s": "first_call_s",
        "numbers counted": "counted",
    }
    facts = about(args.device, rounds=args.rounds, copies=args.copies)
    title = "Counting what every layer holds"
    report = Report(args.out, f"track-{args.device}", title, facts, columns)
    without_convolutions = {name: size for name, size in known.items() if "CNN" not in name}
    for name, size in chosen(parser, args, without_convolutions).items():
        report.add(measure(name, size, args.device, args.rounds, args.copies))


if __name__ == "__main__":
    main()
