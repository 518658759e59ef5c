"""Do the recipes skip where torch's loops skip, and how far apart are they after 200 steps?

Each file of examples/recipes is trained in float16 from a scale that is too high, against the same loop with
torch.autocast and torch.amp.GradScaler: that loop with `funcamp.GradScaler`, the step called eagerly, and the step by
`funcamp.jit` with exact rounding and with default fusion, captured on a GPU. Reported: the skipped steps, for how many
steps every scale and flag is the loop's, and how far the parameters are from the loop's at the end (the largest of a
tensor, over its norm). A step that fuses rounds less often than the loop, so another gradient may overflow.

    python benchmarks/parity.py [--device cuda] [--steps 200] [--sizes "typical;gan"] [--processes 2] [--out DIR]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from _timing import Report, Row, about, arguments, chosen
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcamp
from tests.recipes import NAMES, Trace, example, oracle, trace_of, uncompiled
from tests.support.helpers import difference, to

SIZES = {name: name for name in NAMES}
WRAPS: dict[str, Callable[..., Any]] = {
    "step, eager": uncompiled,
    "funcamp.jit, exact=True": functools.partial(funcamp.jit, exact=True),
    "funcamp.jit": funcamp.jit,
}
CLASS = "torch's loop, funcamp.GradScaler"


def train(name: str, form: str, steps: int, device: str) -> tuple[Any, Trace]:
    """The parameters of a recipe after a run, and its scales and flags; torch's loop as the form "torch"."""
    if form in WRAPS:
        params, history = example(name).train(steps, WRAPS[form], device)
        return params, trace_of(history)
    scaler = funcamp.GradScaler if form == CLASS else torch.amp.GradScaler
    with mock.patch.object(torch.amp, "GradScaler", scaler):
        params, trace = oracle(name).oracle(example(name), steps, device)
    return params, trace


def skips(trace: Trace) -> int:
    """Flags that are set, of all scalers."""
    return sum(int(torch.as_tensor(found).sum()) for _, found in trace)


def rows(name: str, steps: int, device: str) -> Iterator[Row]:
    """One row a form, in this process."""
    torch.backends.cudnn.deterministic = True
    with sdpa_kernel(SDPBackend.MATH):  # the same kernels in all forms
        params, trace = train(name, "torch", steps, device)
        yield {"size": name, "variant": "torch's loop", "skipped": skips(trace), "equal": steps, "apart": 0.0}
        for form in (CLASS, *WRAPS):
            row: Row = {"size": name, "variant": form}
            try:
                ours, found = train(name, form, steps, device)
            except Exception as error:
                print(f"{name}: {form}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                yield row | {"failed": type(error).__name__}
                continue
            equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found, trace)))
            apart = float(f"{difference(to(ours, 'cpu'), to(params, 'cpu')):.2g}")
            yield row | {"skipped": skips(found), "equal": equal, "apart": apart}


def measured(args: argparse.Namespace, name: str) -> list[Row]:
    """The rows of a recipe, from a process of its own."""
    command = [sys.executable, __file__, f"--device={args.device}", f"--steps={args.steps}", "--child", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    found: list[Row] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return found if not done.returncode else [*found, {"size": name, "variant": "all", "failed": "process"}]


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="at a time")
    parser.add_argument("--child", help="one recipe, in this process: rows as JSON")
    args = parser.parse_args()
    if args.child:
        for row in rows(args.child, args.steps, args.device):
            print(json.dumps(row), flush=True)
        return
    columns = {
        "recipe": "size",
        "form": "variant",
        "skipped": "skipped",
        "steps with equal scales and flags": "equal",
        "parameters apart": "apart",
    }
    facts = about(args.device, steps=args.steps)
    report = Report(args.out, f"parity-{args.device}", "Recipes against torch's loops", facts, columns)
    with ThreadPoolExecutor(args.processes) as pool:
        for several in pool.map(functools.partial(measured, args), chosen(parser, args, SIZES)):
            report.add(several)


if __name__ == "__main__":
    main()
