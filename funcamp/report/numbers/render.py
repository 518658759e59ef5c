"""A numerics report as text: a table of operations, a tree of modules, sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from funcamp.numerics.record import Record
from funcamp.report.numbers.operation import Operation
from funcamp.report.torch_names import name_of

#: An operation as numbers and strings by name: a row of `NumericsReport.to_rows`.
Row: TypeAlias = dict[str, Any]

_COLUMNS = (
    "",
    "module",
    "operation",
    "dtype",
    "shape",
    "std",
    "amax",
    "zero",
    "underflow",
    "subnormal",
    "overflow",
    "",
)
#: The statistics that count non-finite values, with the words for them.
_NONFINITE = (("nan", "NaN"), ("posinf", "inf"), ("neginf", "-inf"))


def caption(dtype: torch.dtype, loss_scale: float) -> str:
    """Return what the numbers in the table of operations mean."""
    scaled = "" if loss_scale == 1 else f"gradients are times the loss scale, {power(loss_scale)}; "
    return f"values as in this run: {scaled}fractions are those that rounding to {name_of(dtype)} would lose"


def table(rows: list[Row]) -> str:
    """Return rows of `to_rows` as a table, a line each."""
    lines = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    """Return a row of `to_rows` as short text, one cell per column."""
    zero_fraction = (row["poszero"] + row["negzero"]) / max(row["count"], 1)
    output_index = f"[{row['output']}]" if row["output"] else ""  # of an operation with several outputs
    remarks = [f"{int(row[name])} {word}" for name, word in _NONFINITE if row[name]]
    if row["creates"]:
        remarks = [f"makes {row['creates'].replace(' ', ', ')}", *remarks]
    return (
        "<-" if row["direction"] == "backward" else "->",
        row["module"],
        f"{row['operation']}{output_index}",
        row["dtype"],
        "x".join(map(str, row["shape"])) or "()",
        "n/a" if math.isnan(row["std"]) else f"{row['std']:.3g}",
        f"2^{math.log2(row['amax']):.0f}" if row["amax"] else "0",
        *map(_percent, (zero_fraction, row["underflow"], row["subnormal"], row["overflow"])),
        ", ".join(remarks),
    )


def power(scale: float) -> str:
    """Format a loss scale with its power of two."""
    exponent = math.log2(scale)
    is_exact_integer = 1 <= scale < 2**53 and scale.is_integer()
    number = f"{scale:.0f}" if is_exact_integer else f"{scale:g}"
    return f"{number} (2^{exponent:.0f})" if exponent.is_integer() else number


def no_scale_helps(operation: Operation, cause: str) -> str:
    """Return the sentence for a loss or gradients that are non-finite at every loss scale."""
    if operation.backward:
        what = "gradients are inf or NaN at every loss scale"
    else:
        what = "loss is inf or NaN before it is scaled"
    change = "keep it from dividing by zero, and from a root or logarithm of zero"
    if operation.needs_loss_scaling:
        change = f"compute it in float32 or bfloat16, make what goes into it smaller, or {change}"
    return f"No loss scale helps: the {what}: {cause}. Change that operation: {change}."


def _percent(fraction: float) -> str:
    """Format a fraction, short but distinguishable from 0."""
    if not fraction:
        return ""
    return "<0.01%" if fraction < 1e-4 else f"{100 * fraction:.3g}%"


def annotate(module: nn.Module | None, records: Mapping[str, Record | str]) -> str:
    """Return a module's tree with the standard deviations of each part's output and of its gradient.

    Format: `(-> 0.573, <- 0.000296)`, n/a if there is none. Reads the records on the host: a sync.

    Args:
        module: the module; None for the records only.
        records: by path, as in a tracked step's metrics: scaled, unless `Record.unscale` was called.

    Raises:
        AttributeError: records contains something else than a `Record`.

    Example:
        >>> print(annotate(torch.nn.Sequential(torch.nn.ReLU()), {}))
        Sequential
          (0): ReLU
    """
    if module is None:
        return "\n".join(f"{path or '(module)'}  {record}" for path, record in records.items())
    lines = list(_tree_lines(module, records))
    paths_in_module = {path for path, _ in module.named_modules()}
    for path, record in records.items():
        if path not in paths_in_module:
            lines.append((path, str(record)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {record}".rstrip() for name, record in lines)


def _tree_lines(
    module: nn.Module, records: Mapping[str, Record | str], path: str = "", label: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the name and the record of a module and of everything below it, indented as `print(module)` does."""
    name = type(module).__name__
    extra = module.extra_repr()
    if extra and "\n" not in extra:
        name = f"{name}({extra})"
    record = str(records[path]) if path in records else ""
    yield "  " * depth + label + name, record
    for child_name, child in module.named_children():
        child_path = f"{path}.{child_name}" if path else child_name
        yield from _tree_lines(child, records, child_path, f"({child_name}): ", depth + 1)
