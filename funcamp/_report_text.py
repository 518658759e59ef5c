"""A numerics report as text: a table of its operations, and the module's tree with two numbers beside each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from funcamp._formats import name_of
from funcamp._records import Record

_NUMBERS = ("shape", "std", "amax", "zero", "underflow", "subnormal", "overflow")
COLUMNS = ("", "module", "operation", "dtype", *_NUMBERS, "")


def table(rows: list[dict[str, Any]], dtype: torch.dtype) -> Any:
    """A rich table of `NumericsReport.to_rows`: red where something non-finite is made, yellow above 1 % underflow."""
    try:
        from rich.table import Table
    except ImportError as error:
        raise ImportError("table: needs rich: pip install 'funcamp[demo]'; to_rows() needs nothing") from error

    found = Table(title=f"fractions are those that rounding to {name_of(dtype)} would lose", title_justify="left")
    for name in COLUMNS:
        found.add_column(name, justify="right" if name in _NUMBERS else "left")
    for row in rows:
        style = "red" if row["creates"] else ("yellow" if row["underflow"] > 0.01 else None)
        found.add_row(*cells(row), style=style)
    return found


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of `to_rows` as short text, a cell for each of COLUMNS."""
    zeros = (row["poszero"] + row["negzero"]) / max(row["count"], 1)
    nonfinite = [
        f"{int(row[name])} {word}"
        for name, word in (("nan", "NaN"), ("posinf", "inf"), ("neginf", "-inf"))
        if row[name]
    ]
    made = [f"makes {row['creates'].replace(' ', ', ')}"] if row["creates"] else []
    name = row["operation"] + (f"[{row['output']}]" if row["output"] else "")
    return (
        "<-" if row["direction"] == "backward" else "->",
        row["module"],
        name,
        row["dtype"],
        "x".join(map(str, row["shape"])) or "()",
        "n/a" if math.isnan(row["std"]) else f"{row['std']:.3g}",
        f"2^{math.log2(row['amax']):.0f}" if row["amax"] else "0",
        *(percent(part) for part in (zeros, row["underflow"], row["subnormal"], row["overflow"])),
        ", ".join(made + nonfinite),
    )


def percent(part: float) -> str:
    """A fraction, as short as it can be told from none."""
    return "" if not part else ("<0.01%" if part < 1e-4 else f"{100 * part:.3g}%")


def annotate(module: nn.Module | None, records: Mapping[str, Record]) -> str:
    """Show a module's tree, beside each part the standard deviations of its output and of that one's gradient.

    As `(-> 0.573, <- 0.000296)`; n/a where there is none. Reads the records on the host: a sync.

    Args:
        module: the module; None for the records alone.
        records: by path, as a tracked step's metrics have them: scaled, unless `Record.unscale` was called.

    Raises:
        AttributeError: records holds something else than a `Record`.

    Example:
        >>> print(annotate(torch.nn.Sequential(torch.nn.ReLU()), {}))
        Sequential
          (0): ReLU
    """
    if module is None:
        return "\n".join(f"{path or '(module)'}  {record}" for path, record in records.items())
    lines: list[tuple[str, str]] = []

    def visit(part: nn.Module, path: str, label: str, depth: int) -> None:
        extra = part.extra_repr()
        name = type(part).__name__ + (f"({extra})" if extra and "\n" not in extra else "")
        lines.append(("  " * depth + label + name, str(records[path]) if path in records else ""))
        for child_name, child in part.named_children():
            visit(child, f"{path}.{child_name}" if path else child_name, f"({child_name}): ", depth + 1)

    visit(module, "", "", 0)
    known = {path for path, _ in module.named_modules()}
    lines.extend((path, str(record)) for path, record in records.items() if path not in known)
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:{width}}  {record}".rstrip() for text, record in lines)
