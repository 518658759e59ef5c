"""Host time of one call of a captured `funcamp.jit` step, beyond the launch of its graph.

The graph is replaced by one that does nothing, so that what is left is the wrapper: telling the batch signature and
the state, copying the batch in, cloning the metrics out. States of 10 and of 1,000 leaves, a batch of two tensors,
four numbers as metrics. On a CPU the copies run at once; on a GPU they are launches. Beside it: a plain loop over
the same static tensors, as one writes a capture by hand, which checks nothing.

    python benchmarks/overhead.py [--device cuda] [--rounds 9] [--sizes "10 leaves"] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from torch import Tensor

import funcamp
from funcamp._jit import cuda_graph

CALLS = 2000
SIZES = {"10 leaves": 10, "1,000 leaves": 1000}


class NoGraph:
    """In place of CUDA graphs: warm-up and capture run, a replay does nothing."""

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Not needed."""

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """The results of one run, and a replay that leaves them as they are."""
        return lambda: None, run()


def step(state: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Counts in every leaf."""
    total = batch[0].sum() + batch[1].sum()
    return {name: leaf + 1 for name, leaf in state.items()}, {name: total * index for index, name in enumerate("abcd")}


def captured(leaves: int, device: str) -> Variant:
    """A call of a captured step."""
    batch = (torch.ones(8, device=device), torch.ones(8, device=device))
    with mock.patch.object(cuda_graph, "graphs_for", return_value=NoGraph()):
        run = funcamp.jit(step, backend="aot_eager")
        held = [run({f"leaf{index}": torch.zeros(4, device=device) for index in range(leaves)}, batch)[0]]

    def call() -> None:
        held[0], _ = run(held[0], batch)

    return torch_variant(call, device)


def by_hand(device: str) -> Variant:
    """What every loop around a captured graph does: copy the batch in, replay, clone what is read later."""
    static = [torch.ones(8, device=device) for _ in range(2)]
    batch = [torch.ones(8, device=device) for _ in range(2)]
    metrics = torch.zeros(4, device=device)

    def call() -> Any:
        for target, value in zip(static, batch):
            target.copy_(value, non_blocking=True)
        return metrics.clone().unbind()

    return torch_variant(call, device)


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    columns = {"state": "size", "call": "variant", "median µs": "median_us", "quartiles µs": "quartiles_us"}
    facts, title = about(args.device, rounds=args.rounds), "Host time of a captured step beyond the launch"
    report = Report(args.out, f"overhead-{args.device}", title, facts, columns)
    for name, leaves in chosen(parser, args, SIZES).items():
        makers = {
            "by hand": functools.partial(by_hand, args.device),
            "funcamp.jit": functools.partial(captured, leaves, args.device),
        }
        for row in measured(name, makers, CALLS, args.rounds, args.device):
            if "median_ms" in row:
                row["median_us"] = round(row["median_ms"] * 1e3, 1)
                row["quartiles_us"] = [round(value * 1e3, 1) for value in row["quartiles_ms"]]
            report.add([row])


if __name__ == "__main__":
    main()
