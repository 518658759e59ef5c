"""What does a large stack of Python bring to a first call, at several depths of the caller?

Python gets memory for its stack in pieces. Where a caller's depth puts the end of a piece into a loop, each call in
that loop costs a system call. `jit` makes first calls within one large piece; here they are made with it and without,
in turns, and the least CPU time of this process counts, without that of the C++ compiler.

    python benchmarks/python_stack.py [--sizes "traced;compiled"] [--rounds 3] [--out DIR]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config
from _models import CPU_SIZES
from _timing import about, arguments, check_on_cpu, chosen, table, write
from _variants import funcamp_step

from funcamp._jit.session import with_large_stack


class First(NamedTuple):
    """A kind of first call."""

    backend: str
    depths: range
    """How many calls of Python lead to it."""


SIZES = {"traced": First("eager", range(0, 60, 3)), "compiled": First("inductor", range(0, 60, 10))}


def called_at(depth: int, function: Callable[[], Any]) -> Any:
    """Call a function at a depth."""
    return called_at(depth - 1, function) if depth else function()


def plainly(function: Callable[[], Any]) -> Any:
    """Call a function."""
    return function()


def cpu_seconds(first: First, depth: int, *, large_stack: bool) -> float:
    """The CPU time of a first call in this process."""
    call = funcamp_step(CPU_SIZES["GPT 0.14 M"], "cpu", torch.bfloat16, backend=first.backend)
    caller = with_large_stack if large_stack else plainly
    with mock.patch("funcamp._jit.jit_step.with_large_stack", caller):
        start = time.process_time()
        called_at(depth, call)
        return time.process_time() - start


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__, rounds=3)
    args = parser.parse_args()
    check_on_cpu(parser, args)
    rows, numbers = [], {}
    # The compiler's own cache would leave nothing to do; that of C++ stays, whose compiler is another process.
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        for name, first in chosen(parser, args, SIZES).items():
            cpu_seconds(first, 0, large_stack=True)
            found: dict[int, tuple[float, float]] = {}
            for depth in first.depths:
                pairs = [
                    [cpu_seconds(first, depth, large_stack=large_stack) for large_stack in (False, True)]
                    for _ in range(args.rounds)
                ]
                without, with_it = (min(times) for times in zip(*pairs))
                found[depth] = without, with_it
            numbers[name] = found
            ratios = [without / with_it for without, with_it in found.values()]
            least = min(with_it for _, with_it in found.values())
            values = (least, min(ratios), statistics.mean(ratios), max(ratios))
            rows.append((name, len(ratios), *[f"{value:.2f}" for value in values]))
    columns = ("a first call", "depths", "s with a large stack", "without it: least", "mean", "most, times that")
    title = "First calls with a large stack of Python and without"
    write(args.out, "python-stack-cpu", title, about("cpu"), table(columns, rows), numbers)


if __name__ == "__main__":
    main()
