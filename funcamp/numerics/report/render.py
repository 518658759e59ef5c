"""A numerics report as text and as an HTML page: a table of operations, a tree of modules."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcamp._types import name_of
from funcamp.numerics.record import Record
from funcamp.numerics.report.passes import Operation, Pass, narrow

_NUMBERS = ("shape", "std", "amax", "zero", "underflow", "subnormal", "overflow")
COLUMNS = ("", "module", "operation", "dtype", *_NUMBERS, "")


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
pre, td { font: 12px/1.4 ui-monospace, monospace } pre { overflow-x: auto; background: #f6f6f6; padding: 1em }
table { border-collapse: collapse } td, th { padding: 1px 8px; text-align: left; white-space: nowrap }
th { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #999; font-size: 12px }
tr.made { background: #fdd } tr.flushed { background: #fff3cd } img { max-width: 100% }
"""


def caption(dtype: torch.dtype, loss_scale: float) -> str:
    """Return what the numbers in the table of operations mean."""
    scaled = "" if loss_scale == 1 else f"gradients are times the loss scale, {power(loss_scale)}; "
    return f"values as in this run: {scaled}fractions are those that rounding to {name_of(dtype)} would lose"


def table(rows: list[dict[str, Any]], title: str) -> Any:
    """Return a rich table of `to_rows`: red if a row creates inf or NaN, yellow above 1 % underflow."""
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
    """Return a row of `to_rows` as short text, one cell per column."""
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
    """Format a loss scale with its power of two."""
    exponent = math.log2(scale)
    number = f"{scale:.0f}" if 1 <= scale < 2**53 and scale.is_integer() else f"{scale:g}"
    return f"{number} (2^{exponent:.0f})" if exponent.is_integer() else number


def no_scale_helps(one: Operation, cause: str) -> str:
    """Return the sentence for a loss or gradients that are non-finite at every loss scale."""
    what = "gradients are inf or NaN at every loss scale" if one.backward else "loss is inf or NaN before it is scaled"
    change = "keep it from dividing by zero, and from a root or logarithm of zero"
    if narrow([one]):
        change = f"compute it in float32 or bfloat16, make what goes into it smaller, or {change}"
    return f"No loss scale helps: the {what}: {cause}. Change that operation: {change}."


def at_scales(passes: list[Pass]) -> list[str]:
    """Return sentences on the scales at which the backward passes were finite."""
    found = []
    for index, one in enumerate(passes):
        run = f"Backward pass{f' {index + 1}' if len(passes) > 1 else ''}: at the loss scale {power(one.loss_scale)} "
        run += f"the gradients {'are finite' if one.finite else 'overflow'}"
        if one.largest_scale is not None:
            found.append(f"{run}; repeated at others, they are finite up to {power(one.largest_scale)}.")
        elif one.obstacle and not one.finite:
            found.append(
                f"{run}; it could not be repeated at others ({one.obstacle}), so their size is unknown. Run "
                "this report once in float32 or bfloat16: the loss scale that it recommends works in float16 too."
            )
    return found


def percent(part: float) -> str:
    """Format a fraction, short but distinguishable from 0."""
    return "" if not part else ("<0.01%" if part < 1e-4 else f"{100 * part:.3g}%")


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


def write_page(
    path: Path,
    title: str,
    sentences: list[str],
    tree: str,
    picture: bytes,
    caption: str,
    rows: list[dict[str, Any]],
) -> Path:
    """Write the page of `NumericsReport.to_html`."""
    lines = []
    for row in rows:
        kind = "made" if row["creates"] else ("flushed" if row["underflow"] > 0.01 else "")
        line = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
        lines.append(f'<tr class="{kind}">{line}</tr>')
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    said = "".join(f"<li>{html.escape(line)}</li>" for line in sentences)
    image = ""
    if picture:
        encoded = base64.b64encode(picture).decode()
        image = f'<h2>Exponents</h2><img alt="exponents of every operation" src="data:image/png;base64,{encoded}">'
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><ul>{said}</ul>",
        f"<h2>Modules</h2><pre>{html.escape(tree)}</pre>{image}",
        f"<h2>Operations</h2><p>{html.escape(caption.capitalize())}.</p>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></body></html>\n",
    ]
    path.write_text("".join(parts), encoding="utf-8")
    return path
