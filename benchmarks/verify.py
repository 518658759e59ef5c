"""What does `funcamp.verify` find in seventy models of public packages?

It compares torch's loop, the eager step, the traced step and a saved state.

    python benchmarks/verify.py [--sizes "GPT-2;Llama"] [--dtypes float16] [--out benchmarks/results]

Each model has its own form of batch and its dropout on, AdamW with clipping, and three steps, of which float16 skips
one. The compiled step is `jit` without a compiler, which runs the traced operations one by one.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from functools import partial
from typing import Any

from _public import PACKAGES
from _timing import Report, Row, about, arguments, chosen
from _verified import verified
from _zoo import ZOO, task
from coverage import ALSO, DTYPES, batches, describe_error

STEPS = 3


def made(name: str) -> tuple[Any, Any, list[Any]]:
    """A model, its criterion and its batches."""
    given = task(name)
    return given.model, given.criterion, batches(given, STEPS)


def row_of(name: str, dtype: str) -> Row:
    """The row of a model in a dtype."""
    warnings.simplefilter("ignore")
    row: Row = {"size": name, "variant": dtype}
    columns, packages = ("eager", "traced", "saved"), (*PACKAGES, *ALSO)
    return verified(row, partial(made, name), STEPS, columns, describe_error, packages, backend="eager")


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
