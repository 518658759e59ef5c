"""What does each trick of `jit` bring by itself, in steps and in first calls?

A trick is a pass or an option whose reason is time, not a defect of torch. For public models and the sizes of
benchmarks/step.py: torch's eager loop with GradScaler, `jit` as it is, and `jit` without each trick that the program
gets. Steps are timed side by side in one process, in a new order in each round; ratios are within a round. First calls
are those of further processes, each with an empty compile cache, in turns.

    python benchmarks/passes.py [--sizes "GPT-2 3.4 M;..."] [--variants "funcamp.jit;..."] [--rounds 9]
        [--first-calls 3] [--out DIR]
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from _models import CPU_SIZES, Size
from _public import PUBLIC_SIZES
from _timing import Report, Row, about, arguments, chosen, in_fresh_processes, measured, seconds, torch_variant
from _variants import funcamp_step, torch_loop

from funcamp._jit.passes import pipeline
from funcamp._jit.passes.program import Target

KNOWN = PUBLIC_SIZES | CPU_SIZES
EAGER = "torch's eager loop"
ALL = "funcamp.jit"


def tricks() -> list[str]:
    """Return the names of what a program on a CPU gets for its time."""
    target = Target("inductor", frozenset({"cpu"}))
    return [one.name for one in pipeline() if one.where(target) and not one.defect]


def makers() -> dict[str, Any]:
    """Return what makes each variant of a size, torch's eager loop first."""
    found: dict[str, Any] = {EAGER: lambda size: torch_loop(size, "cpu", torch.bfloat16)}
    found[ALL] = lambda size: funcamp_step(size, "cpu", torch.bfloat16)
    for name in tricks():
        found[f"without {name}"] = functools.partial(without, name)
    return found


def without(name: str, size: Size) -> Any:
    """Return a step that is compiled without one trick."""
    return funcamp_step(size, "cpu", torch.bfloat16, without=[name])


def rows_of(name: str, rounds: int, first_calls: int, labels: list[str]) -> Iterator[Row]:
    """Yield a row for each of these variants: its steps, then its first calls."""
    size = KNOWN[name]

    def variant(make: Any) -> Any:
        return torch_variant(make(size), "cpu")

    chosen_makers = {label: functools.partial(variant, make) for label, make in makers().items() if label in labels}
    rows = {row["variant"]: row for row in measured(name, chosen_makers, size.steps, rounds, "cpu")}
    taken: dict[str, list[float]] = {label: [] for label in rows if label != EAGER and "failed" not in rows[label]}
    turns = random.Random(0)
    for _ in range(first_calls):
        for label in turns.sample(list(taken), len(taken)):
            taken[label] += in_fresh_processes(__file__, ["--sizes", name, "--start", label], times=1)
    for label, row in rows.items():
        row.pop("first_call_s", None)
        if taken.get(label):
            row["first_call_s"] = round(statistics.median(taken[label]), 1)
            row["first_calls_s"] = sorted(round(value, 1) for value in taken[label])
        yield row


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--first-calls", type=int, default=3, help="processes for each variant's first call")
    parser.add_argument("--variants", help="names of variants beside the eager one, separated by semicolons")
    parser.add_argument("--start", help="seconds of one variant's first call, in this process")
    args = parser.parse_args()
    sizes = chosen(parser, args, KNOWN)
    if args.start:
        (size,) = sizes.values()
        first, _ = seconds(torch_variant(makers()[args.start](size), "cpu"), 1)
        print(json.dumps(first))
        return
    cold = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    facts = about("cpu", rounds=args.rounds, first_calls=args.first_calls)
    columns = {
        "model": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "time over eager": "ratio",
        "first call s": "first_call_s",
        "all first calls s": "first_calls_s",
    }
    report = Report(args.out, "passes-cpu", "Each trick of jit left out", facts, columns)
    labels = [EAGER, *args.variants.split(";")] if args.variants else list(makers())
    if strangers := [label for label in labels if label not in makers()]:
        parser.error(f"--variants must name {'; '.join(makers())}; got {'; '.join(strangers)}")
    for name in sizes:
        report.add(rows_of(name, args.rounds, args.first_calls, labels))


if __name__ == "__main__":
    main()
