"""What `funcamp.verify` says of a step, as a row of a table: of verify.py on a CPU, of gpu_verify.py on a GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _timing import Row

import funcamp
from funcamp._verify.report import Comparison


def verified(
    row: Row,
    make: Callable[[], tuple[Any, Any, list[Any]]],
    steps: int,
    columns: tuple[str, str, str],
    failure: Callable[[Exception], str],
    packages: Iterable[str] = (),
    **options: Any,
) -> Row:
    """Return a row with the three comparisons, or with what it failed with.

    Args:
        row: its size, and its variant, which is the policy.
        make: returns a model, its criterion and the batches.
        steps: how many to compare.
        columns: the keys of the comparisons.
        failure: describes an error.
        packages: paths in them begin at their folder.
        options: those of jit.
    """
    start = time.perf_counter()
    try:
        model, criterion, batches = make()
        loss_fn = funcamp.module_loss(model, criterion)
        adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-3)
        step = funcamp.make_train_step(loss_fn, adamw, policy=row["variant"], max_norm=1.0)
        found = funcamp.verify(funcamp.jit(step, **options), batches, steps=steps)
    except Exception as error:
        return row | {"failed": failure(error)}
    for column, comparison in zip(columns, found.comparisons):
        row[column] = _shown(comparison, packages)
    return row | {"ok": "yes" if found.ok else "no", "seconds": round(time.perf_counter() - start, 1)}


def _shown(comparison: Comparison, packages: Iterable[str]) -> str:
    """A comparison in a cell."""
    detail = comparison.detail().replace("|", "/")
    if names := "|".join(packages):
        detail = re.sub(rf"/[^ ]*/(?=(?:{names})/)", "", detail)
    return f"{comparison.outcome.value}: {detail}" if detail else comparison.outcome.value
