"""Pictures: the exponents of every operation, and the flushed fraction per layer and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp.numerics.counting import LOWEST
from funcamp.numerics.formats import format_of
from funcamp.numerics.record import Record
from funcamp.numerics.statistics import Stats
from funcamp.report.numbers.operation import Operation
from funcamp.report.torch_names import name_of

#: The exponents that a picture shows at least: from the first up to the second.
_LEAST_EXPONENTS = (-30, 18)

#: The maximum number of rows in a picture.
_MAX_ROWS = 160


def _import_pyplot(call: str) -> Any:
    """Return matplotlib.pyplot, with the backend that needs no display if it can be set."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError(f"{call}: needs matplotlib: pip install 'funcamp[plot]'") from error
    mpl.use("agg", force=False)
    import matplotlib.pyplot as plt

    return plt


class Line(NamedTuple):
    """One row of the picture."""

    label: str
    backward: bool
    stats: Stats
    failed: bool


def of_operations(operations: list[Operation]) -> list[Line]:
    """Return a row per output with more than one number; a row per output if none has."""
    shown_operations = [operation for operation in operations if operation.shape] or operations
    lines = []
    for operation in shown_operations:
        output_index = f"[{operation.output}]" if operation.output else ""
        label = f"{operation.path} {operation.name}{output_index}"
        lines.append(Line(label, operation.backward, operation.stats, failed=bool(operation.creates)))
    return lines


def of_modules(records: Mapping[str, Record]) -> list[Line]:
    """Return a row per module output, then one per gradient of it, in the order of the backward pass."""
    forward = []
    backward = []
    for path, record in records.items():
        label = path or "(module)"
        forward.append(Line(label, backward=False, stats=record.forward, failed=False))
        backward.append(Line(label, backward=True, stats=record.backward, failed=False))
    return [line for line in [*forward, *reversed(backward)] if line.stats.count > 0]


def draw(rows: list[Line], path: Path, dtype: torch.dtype) -> None:
    """Draw the picture of `NumericsReport.plot`: each row's histogram relative to its fullest bin."""
    bounds = format_of(dtype)
    pyplot = _import_pyplot("plot")
    if not rows:
        raise ValueError("plot: the report must have something to draw; got nothing")
    rows_left_out = len(rows) - _MAX_ROWS
    rows = rows[:_MAX_ROWS]
    counts = torch.stack([row.stats.histogram.cpu() for row in rows])
    low, high = _exponents_to_show(counts)
    shown_counts = counts[:, low - LOWEST : high - LOWEST]
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.17 * len(rows)), layout="constrained")
    for backward, colors in ((False, "Blues"), (True, "Oranges")):
        is_drawn = torch.tensor([row.backward == backward for row in rows])
        _draw_histograms(axes, shown_counts, is_drawn, colors, low, high)
    limits = {"zero below": bounds.underflow, "subnormal below": bounds.tiny, "largest": bounds.max}
    for label, limit in limits.items():
        exponent = math.log2(limit)
        if low <= exponent <= high:
            axes.axvline(exponent, color="black", linewidth=0.8, linestyle="--")
            axes.text(exponent, -0.8, label, ha="center", va="bottom", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{'<-' if row.backward else '->'} {row.label}" for row in rows], fontsize=6)
    for index, row in enumerate(rows):
        if row.failed:
            axes.get_yticklabels()[index].set_color("red")
    title = f"{name_of(dtype)}: exponents in the forward pass (blue) and the backward pass (orange)"
    if rows_left_out > 0:
        title = f"{title}; {rows_left_out} more left out"
    axes.set_title(title, fontsize=9, pad=14)
    axes.set_xlabel("exponent of 2")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _exponents_to_show(counts: Tensor) -> tuple[int, int]:
    """Return the exponents at both ends of a picture, for histograms of shape (rows, bins)."""
    low, high = _LEAST_EXPONENTS
    used_bins = counts.sum(0).nonzero().flatten()
    if not len(used_bins):
        return low, high
    used_exponents = used_bins + LOWEST
    return min(low, int(used_exponents.min())), max(high, int(used_exponents.max()) + 1)


def _draw_histograms(axes: Any, counts: Tensor, is_drawn: Tensor, colors: str, low: int, high: int) -> None:
    """Draw some of the rows, each count relative to the largest of its row; empty bins are left blank."""
    shares = counts / counts.amax(1, keepdim=True).clamp(min=1)
    brightness = shares.sqrt()  # sqrt, so that small counts are visible
    brightness = brightness.where(is_drawn.unsqueeze(1) & (counts > 0), math.nan)
    axes.imshow(
        brightness.numpy(),
        cmap=colors,
        vmin=-0.25,
        vmax=1,
        aspect="auto",
        extent=(low, high, len(counts) - 0.5, -0.5),
        interpolation="nearest",
    )


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
    first_records = steps[0][1]
    names = list(first_records)
    for step, records in steps:
        if list(records) != names or not names:
            raise ValueError(f"plot_flushed: history must have the same layers at every step; step {step} differs")
    pyplot = _import_pyplot("plot_flushed")
    columns = []
    for _, records in steps:
        gradients = [records[name].backward.total() for name in names]
        columns.append(torch.stack([gradient.underflow(dtype).cpu() for gradient in gradients]))
    flushed = torch.stack(columns, 1)  # shape (layers, steps)
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.2 * len(names)), layout="constrained")
    image = axes.imshow(
        flushed.numpy(),
        aspect="auto",
        cmap="magma_r",
        vmin=0,
        vmax=max(0.01, flushed.max().item()),
        interpolation="nearest",
    )
    labeled_steps = range(0, len(steps), max(1, len(steps) // 12))
    axes.set_xticks(list(labeled_steps), [steps[index][0] for index in labeled_steps])
    axes.set_yticks(range(len(names)), [name or "(module)" for name in names], fontsize=7)
    axes.set_xlabel("step")
    axes.set_title(f"fraction of each layer's gradient that {name_of(dtype)} flushes to zero", fontsize=9)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return Path(path)
