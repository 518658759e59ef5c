"""How much longer does a training loop take while the auditor watches it?

Three ways to run torch's AMP loop in float16, interleaved in one process: as it is; under the auditor; and under all
that `python -m funcamp report` runs, with its recorder, which has recorded its pass. In loops of small operations the
Python around each operation is most of the time, in loops of large ones the operations are.

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
from funcamp.report.numbers.recorder import Recorder

#: Steps in a call, which a watcher begins and ends once.
STEPS = 20


class Size(NamedTuple):
    """A loop to watch."""

    layers: int
    units: int
    rows: int
    calls: int
    """Calls in one timing."""


SIZES = {
    "4 layers of 64 units": Size(layers=4, units=64, rows=32, calls=3),
    "6 layers of 1,024 units": Size(layers=6, units=1024, rows=32, calls=1),
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
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    return steps


def watched(size: Size, *watchers: Callable[[], Recorder | Auditor]) -> Variant:
    """The loop under new watchers in each call."""
    steps = loop(size)

    def call() -> None:
        with contextlib.ExitStack() as stack:
            for make_watcher in watchers:
                stack.enter_context(make_watcher().watching())
            steps()

    return torch_variant(call, "cpu")


def recorder() -> Recorder:
    """The recorder of the command, which records the first backward pass."""
    return Recorder(None, first=1, passes=1)


#: The watchers of a run, the outermost first.
VARIANTS: dict[str, tuple[Callable[[], Recorder | Auditor], ...]] = {
    "as it is": (),
    "under the auditor": (Auditor,),
    "under the command": (recorder, Auditor),
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
    facts = about("cpu", rounds=args.rounds, steps=STEPS)
    report = Report(args.out, "auditor-cpu", "A loop under the auditor", facts, columns)
    for name, size in chosen(parser, args, SIZES).items():
        makers = {label: functools.partial(watched, size, *watchers) for label, watchers in VARIANTS.items()}
        for row in measured(name, makers, size.calls, args.rounds, "cpu"):
            if "median_ms" in row:
                row["step_ms"] = round(row["median_ms"] / STEPS, 3)
            report.add([row])


if __name__ == "__main__":
    main()
