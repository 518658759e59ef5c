"""How much longer does a training loop take under `python -m funcamp report`?

Three ways to run torch's AMP loop in float16, interleaved in one process: as it is; with the auditor, which looks for
mistakes; and with all that the command runs, which also records the first step operation by operation. In loops of
small operations the Python around each operation is most of the time, in loops of large ones the operations are.

    python benchmarks/auditor.py [--rounds 9] [--sizes "4 layers of 64 units"] [--out DIR]
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from _timing import Report, Variant, about, arguments, check_on_cpu, chosen, measured, torch_variant
from torch import nn

from funcamp.report.audit import Auditor
from funcamp.report.mode import Mode
from funcamp.report.numbers.recorder import Recorder


class Size(NamedTuple):
    """A loop to watch."""

    layers: int
    units: int
    rows: int
    steps: int
    """Steps in a call, of which the command records one. It watches 100 by default."""


SIZES = {
    "4 layers of 64 units": Size(layers=4, units=64, rows=32, steps=100),
    "6 layers of 1,024 units": Size(layers=6, units=1024, rows=32, steps=20),
}


def loop(size: Size) -> Callable[[], None]:
    """Return a function that takes some steps of an AMP loop."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(size.units, size.units), nn.ReLU()) for _ in range(size.layers)]
    model = nn.Sequential(*layers, nn.Linear(size.units, 1))
    x = torch.randn(size.rows, size.units)
    y = torch.randn(size.rows, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def steps() -> None:
        for _ in range(size.steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    return steps


def watched(size: Size, *, audited: bool, recorded: bool) -> Variant:
    """The loop under a new auditor in each call, and a recorder of the first backward pass."""
    steps = loop(size)

    def call() -> None:
        mode = Mode()
        with contextlib.ExitStack() as stack:
            if recorded:
                stack.enter_context(Recorder(mode, passes=1).watching())
            if audited:
                stack.enter_context(Auditor().watching(mode))
            steps()

    return torch_variant(call, "cpu")


VARIANTS = {
    "as it is": {"audited": False, "recorded": False},
    "with the auditor": {"audited": True, "recorded": False},
    "under the command": {"audited": True, "recorded": True},
}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    check_on_cpu(parser, args)
    columns = {
        "loop": "size",
        "run": "variant",
        "ms a step": "step_ms",
        "time over as it is": "ratio",
        "quartiles": "ratio_quartiles",
    }
    facts = about("cpu", rounds=args.rounds)
    report = Report(args.out, "auditor-cpu", "A loop under the report", facts, columns)
    for name, size in chosen(parser, args, SIZES).items():
        makers = {label: functools.partial(watched, size, **watchers) for label, watchers in VARIANTS.items()}
        for row in measured(name, makers, 1, args.rounds, "cpu"):
            if "median_ms" in row:
                row["step_ms"] = round(row["median_ms"] / size.steps, 3)
            report.add([row])


if __name__ == "__main__":
    main()
