"""A numerics report as text: a table of its operations, and the module's tree with two numbers beside each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from funcamp._numerics.record import Record
from funcamp._report.passes import Operation, Pass, narrow
from funcamp._types import name_of

_NUMBERS = ("shape", "std", "amax", "zero", "underflow", "subnormal", "overflow")
COLUMNS = ("", "module", "operation", "dtype", *_NUMBERS, "")


def caption(dtype: torch.dtype, loss_scale: float) -> str:
    """What the numbers in the table of operations are."""
    scaled = "" if loss_scale == 1 else f"gradients are times the loss scale, {power(loss_scale)}; "
    return f"values as in this run: {scaled}fractions are those that rounding to {name_of(dtype)} would lose"


def table(rows: list[dict[str, Any]], title: str) -> Any:
    """A rich table of `NumericsReport.to_rows`: red where something non-finite is made, yellow above 1 % underflow."""
    try:
        from rich.table import Table
    except ImportError as error:
        raise ImportError("table: needs rich: pip install 'funcamp[demo]'; to_rows() needs nothing") from error

    found = Table(title=title, title_justify="left")
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


def power(scale: float) -> str:
    """A loss scale, and which power of two it is."""
    exponent = math.log2(scale)
    number = f"{scale:.0f}" if 1 <= scale < 2**53 and scale.is_integer() else f"{scale:g}"
    return f"{number} (2^{exponent:.0f})" if exponent.is_integer() else number


def no_scale_helps(one: Operation, cause: str) -> str:
    """The sentence of a run whose loss or gradients are not finite whatever the loss scale."""
    what = "gradients are inf or NaN at every loss scale" if one.backward else "loss is inf or NaN before it is scaled"
    change = "keep it from dividing by zero, and from a root or logarithm of zero"
    if narrow([one]):
        change = f"compute it in float32 or bfloat16, make what goes into it smaller, or {change}"
    return f"No loss scale helps: the {what}: {cause}. Change that operation: {change}."


def at_scales(passes: list[Pass]) -> list[str]:
    """Sentences on the scales at which the backward passes were seen finite."""
    found = []
    for index, one in enumerate(passes):
        run = f"Backward pass{f' {index + 1}' if len(passes) > 1 else ''}: at the loss scale {power(one.loss_scale)} "
        run += f"the gradients {'are finite' if one.finite else 'overflow'}"
        if one.largest_scale is not None:
            found.append(f"{run}; repeated at others, they are finite up to {power(one.largest_scale)}.")
        elif one.obstacle and not one.finite:
            found.append(
                f"{run}; it could not be repeated at others ({one.obstacle}), so how large they are is not known. Run "
                "this report once in float32 or bfloat16: the loss scale that it gives works in float16 too."
            )
    return found


def percent(part: float) -> str:
    """A fraction, as short as it can be told from none."""
    return "" if not part else ("<0.01%" if part < 1e-4 else f"{100 * part:.3g}%")


def annotate(module: nn.Module | None, records: Mapping[str, Record | str]) -> str:
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
