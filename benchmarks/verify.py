"""What does `funcamp.verify` find in seventy models of public packages?

It compares torch's loop, the eager step, the traced step and a saved state.

    python benchmarks/verify.py [--sizes "GPT-2;Llama"] [--dtypes float16] [--out benchmarks/results]

Each model has its own form of batch and its dropout on, AdamW with clipping, and three steps, of which float16 skips
one. The compiled step is `jit` without a compiler, which runs the traced operations one by one.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
import warnings

import torch
from _public import PACKAGES
from _timing import Report, Row, about, arguments, chosen
from _zoo import ZOO, task
from coverage import ALSO, DTYPES, batches, describe_error

import funcamp
from funcamp._verify.report import Comparison

STEPS = 3


def row_of(name: str, dtype: str) -> Row:
    """The three comparisons of a model in a dtype, or what it failed with."""
    warnings.simplefilter("ignore")
    row: Row = {"size": name, "variant": dtype}
    start = time.perf_counter()
    try:
        given = task(name)
        loss_fn = funcamp.module_loss(given.model, given.criterion)
        adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-3)
        step = funcamp.make_train_step(loss_fn, adamw, policy=dtype, max_norm=1.0)
        found = funcamp.verify(funcamp.jit(step, backend="eager"), batches(given, STEPS), steps=STEPS)
    except Exception as error:
        return row | {"failed": describe_error(error)}
    for column, comparison in zip(("eager", "traced", "saved"), found.comparisons):
        row[column] = shown(comparison)
    return row | {"ok": "yes" if found.ok else "no", "seconds": round(time.perf_counter() - start, 1)}


def shown(comparison: Comparison) -> str:
    """A comparison in a cell; paths begin at the folder of their package."""
    detail = comparison.detail().replace("|", "/")
    detail = re.sub(rf"/[^ ]*/(?=(?:{'|'.join((*PACKAGES, *ALSO))})/)", "", detail)
    return f"{comparison.outcome.value}: {detail}" if detail else comparison.outcome.value


def main() -> None:
    """Run all, and write what is known after each."""
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", default=";".join(DTYPES))
    args = parser.parse_args()
    names = chosen(parser, args, ZOO)
    facts = about("cpu", steps=STEPS, **{name: importlib.metadata.version(name) for name in (*PACKAGES, *ALSO)})
    columns = {
        "model": "size",
        "dtype": "variant",
        "agrees": "ok",
        "eager step to torch's loop": "eager",
        "traced to eager": "traced",
        "traced, saved and loaded, to eager": "saved",
        "seconds": "seconds",
    }
    report = Report(args.out, "verify-cpu", "What verify says of models of public packages", facts, columns)
    for name in names:
        report.add(row_of(name, dtype) for dtype in args.dtypes.split(";"))


if __name__ == "__main__":
    main()
