"""Pictures: the exponents of every operation, and the flushed fraction per layer and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcamp.numerics.counting import LOWEST
from funcamp.numerics.formats import format_of
from funcamp.numerics.record import Record
from funcamp.numerics.statistics import Stats
from funcamp.report.numbers.operation import Operation
from funcamp.report.torch_names import name_of

#: The exponents that a picture shows.
_LOW, _HIGH = -40, 40
#: The maximum number of rows in a picture.
_MAX_ROWS = 160


def _subplots(call: str, width: float, rows: int) -> Any:
    """Return pyplot, a figure and its axes for some rows, without a display."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError(f"{call}: needs matplotlib: pip install 'funcamp[plot]'") from error
    mpl.use("agg", force=False)
    import matplotlib.pyplot as plt

    return plt, *plt.subplots(figsize=(width, 1.6 + 0.18 * rows), layout="constrained")


class Line(NamedTuple):
    """One row of the picture."""

    label: str
    backward: bool
    stats: Stats


def of_operations(operations: list[Operation]) -> list[Line]:
    """Return a row per output with more than one number; a row per output if none has."""
    shown = [operation for operation in operations if operation.shape] or operations
    return [Line(f"{one.path} {one.name}{' !' if one.creates else ''}", one.backward, one.stats) for one in shown]


def of_modules(records: Mapping[str, Record]) -> list[Line]:
    """Return a row per module output, then one per gradient of it, in the order of the backward pass."""
    forward = [Line(path or "(module)", False, record.forward) for path, record in records.items()]
    backward = [Line(path or "(module)", True, record.backward) for path, record in records.items()]
    return [line for line in [*forward, *reversed(backward)] if line.stats.count > 0]


def draw(rows: list[Line], path: Path, dtype: torch.dtype) -> Path:
    """Draw the picture of `NumericsReport.plot`: each row's histogram relative to its fullest bin."""
    bounds = format_of(dtype)
    if not rows:
        raise ValueError("plot: the report must have something to draw; got nothing")
    rows_left_out = len(rows) - _MAX_ROWS
    rows = rows[:_MAX_ROWS]
    pyplot, figure, axes = _subplots("plot", 11, len(rows))
    counts = torch.stack([row.stats.histogram.cpu() for row in rows])[:, _LOW - LOWEST : _HIGH - LOWEST]
    brightness = (counts / counts.amax(1, keepdim=True).clamp(min=1)).sqrt()  # so that small counts are visible
    is_backward = torch.tensor([row.backward for row in rows]).unsqueeze(1)
    for is_drawn, colors in ((~is_backward, "Blues"), (is_backward, "Oranges")):
        image = brightness.where(is_drawn & (counts > 0), math.nan).numpy()
        extent = (_LOW, _HIGH, len(rows) - 0.5, -0.5)
        axes.imshow(image, colors, vmin=-0.25, vmax=1, aspect="auto", extent=extent, interpolation="nearest")
    for label, limit in {"zero below": bounds.underflow, "subnormal below": bounds.tiny, "largest": bounds.max}.items():
        axes.axvline(math.log2(limit), color="black", linewidth=0.8, linestyle="--")
        axes.text(math.log2(limit), -0.8, label, ha="center", va="bottom", fontsize=7)
    axes.set_xlim(_LOW, _HIGH)
    axes.set_yticks(range(len(rows)), [f"{'<-' if row.backward else '->'} {row.label}" for row in rows], fontsize=6)
    left_out = f"; {rows_left_out} more left out" if rows_left_out > 0 else ""
    title = f"{name_of(dtype)}: exponents in the forward pass (blue) and the backward pass (orange){left_out}"
    axes.set_title(title, fontsize=9, pad=14)
    axes.set_xlabel("exponent of 2")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def plot_flushed(
    history: Iterable[tuple[int, Mapping[str, Record]]], path: str | Path, dtype: torch.dtype = torch.float16
) -> Path:
    """Draw, per layer and step, the fraction of the gradient that a format flushes to zero.

    Args:
        history: steps with the records in the tracked step's metrics. Records are drawn as given: with
            `Record.unscale` the picture shows the gradients without loss scaling.
        path: the picture to write; its extension sets the file type.
        dtype: the format.

    Returns:
        The path. Reads the records on the host: a sync.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: dtype has no known limits.
        ValueError: history is empty, or its records have different names.

    Example:
        >>> import tempfile
        >>> from funcamp.numerics import probe, tap
        >>> records = {"layer": torch.func.grad(lambda q: (tap(torch.ones(2), q) * 1e-9).sum())(probe())}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_flushed([(0, records), (10, records)], folder + "/flushed.png").name
        'flushed.png'
    """
    format_of(dtype)
    steps = list(history)
    if not steps:
        raise ValueError("plot_flushed: history must hold a step; got none")
    names = list(steps[0][1])
    for step, records in steps:
        if list(records) != names or not names:
            raise ValueError(f"plot_flushed: history must have the same layers at every step; step {step} differs")
    pyplot, figure, axes = _subplots("plot_flushed", 9, len(names))
    columns = []
    for _, records in steps:
        gradients = [records[name].backward.total() for name in names]
        columns.append(torch.stack([gradient.underflow(dtype).cpu() for gradient in gradients]))
    flushed = torch.stack(columns, 1)  # shape (layers, steps)
    largest = max(0.01, flushed.max().item())
    image = axes.imshow(flushed.numpy(), "magma_r", vmin=0, vmax=largest, aspect="auto", interpolation="nearest")
    labeled_steps = range(0, len(steps), max(1, len(steps) // 12))
    axes.set_xticks(list(labeled_steps), [steps[index][0] for index in labeled_steps])
    axes.set_yticks(range(len(names)), [name or "(module)" for name in names], fontsize=7)
    axes.set_xlabel("step")
    axes.set_title(f"fraction of each layer's gradient that {name_of(dtype)} flushes to zero", fontsize=9)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return Path(path)
