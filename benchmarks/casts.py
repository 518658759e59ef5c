"""What does the pass `casts` save, which casts groups of parameters and their gradients in one operation?

`funcamp.jit` with and without it, beside torch's eager loop, bfloat16 on a CPU. The variants run interleaved in one
process; ratios are within a round. The peak of memory is that of further processes.

    python benchmarks/casts.py [--sizes "GPT-2 3.4 M;..."] [--rounds 9] [--out DIR]
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from _models import CPU_SIZES, Size
from _public import PUBLIC_SIZES
from _timing import (
    Report,
    Row,
    about,
    arguments,
    chosen,
    in_fresh_processes,
    kilobytes,
    measured,
    seconds,
    torch_variant,
)
from _variants import funcamp_step, torch_loop

EAGER = "torch's eager loop"
JIT = "funcamp.jit"
WITHOUT = "funcamp.jit without casts"
MLPS = {
    f"MLP {millions} M, {rows} rows": CPU_SIZES[f"MLP {millions} M"]._replace(batch=rows, steps=steps)
    for millions, rows, steps in (
        ("0.14", 64, 60),
        ("0.14", 512, 20),
        ("3.2", 64, 20),
        ("3.2", 512, 5),
        ("38", 64, 4),
        ("38", 512, 2),
    )
}
SIZES = PUBLIC_SIZES | MLPS
MAKERS: dict[str, Any] = {
    EAGER: torch_loop,
    JIT: funcamp_step,
    WITHOUT: functools.partial(funcamp_step, without=("casts",)),
}


def measure(name: str, rounds: int) -> Iterator[Row]:
    """A row a variant; the second ratio is over the program without the pass."""
    size = SIZES[name]

    def make(label: str) -> Any:
        return torch_variant(MAKERS[label](size, "cpu", torch.bfloat16), "cpu")

    makers = {label: functools.partial(make, label) for label in MAKERS}
    bases = {"ratio": dict.fromkeys(MAKERS, EAGER), "over_without": dict.fromkeys(MAKERS, WITHOUT)}
    for row in measured(name, makers, size.steps, rounds, "cpu", bases=bases):
        if row["variant"] != EAGER and "failed" not in row:
            _, warm = in_fresh_processes(__file__, ["--sizes", name, "--child", row["variant"]], times=2)
            row |= warm
        yield row


def child(name: str, label: str) -> None:
    """Print the most resident MB of a few steps of one variant, as JSON."""
    size: Size = SIZES[name]
    seconds(torch_variant(MAKERS[label](size, "cpu", torch.bfloat16), "cpu"), 4)
    print(json.dumps({"peak_mb": round(kilobytes("VmHWM") / 1024)}))


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--child", help="one variant, in this process")
    args = parser.parse_args()
    sizes = chosen(parser, args, SIZES)
    if args.child:
        child(next(iter(sizes)), args.child)
        return
    cold = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    columns = {
        "model": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "time over eager": "ratio",
        "time over without": "over_without",
        "quartiles": "over_without_quartiles",
        "peak RSS MB": "peak_mb",
        "first call s": "first_call_s",
    }
    title = "Casts of groups of parameters, and of each part"
    report = Report(args.out, "casts-cpu", title, about("cpu", rounds=args.rounds), columns)
    for name in sizes:
        report.add(measure(name, args.rounds))


if __name__ == "__main__":
    main()
