"""Pictures: the exponents of every operation, and the flushed fraction per layer and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcamp._types import name_of
from funcamp.numerics.counting import LOWEST
from funcamp.numerics.formats import format_of
from funcamp.numerics.record import Record
from funcamp.numerics.report.passes import Operation
from funcamp.numerics.statistics import Stats

#: Exponents shown at least, and the maximum number of rows in a picture.
_SHOWN, _ROWS = (-30, 18), 160


def _pyplot(call: str) -> Any:
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
    """Return a row per output with more than one number."""
    return [
        Line(
            f"{one.path} {one.name}{f'[{one.output}]' if one.output else ''}",
            one.backward,
            one.stats,
            bool(one.creates.any()),
        )
        for one in [one for one in operations if one.shape] or operations
    ]


def of_modules(records: Mapping[str, Record]) -> list[Line]:
    """Return a row per module output, then one per gradient of it, in the order of the backward pass."""
    forward = [Line(path or "(module)", False, record.forward, False) for path, record in records.items()]
    backward = [Line(path or "(module)", True, record.backward, False) for path, record in records.items()]
    return [line for line in [*forward, *reversed(backward)] if line.stats.count > 0]


def draw(rows: list[Line], path: Path | BytesIO, dtype: torch.dtype) -> None:
    """Draw the picture of `NumericsReport.plot`: each row's histogram relative to its fullest bin."""
    known = format_of(dtype)
    plt = _pyplot("plot")
    if not rows:
        raise ValueError("plot: the report must have something to draw; got nothing")
    left_out = len(rows) - _ROWS
    rows = rows[:_ROWS]
    counts = torch.stack([one.stats.histogram.cpu() for one in rows])
    used = counts.sum(0).nonzero().flatten() + LOWEST
    low = min(_SHOWN[0], int(used.min()) if len(used) else 0)
    high = max(_SHOWN[1], int(used.max()) + 1 if len(used) else 0)
    part = counts[:, low - LOWEST : high - LOWEST]
    shares = part / part.amax(1, keepdim=True).clamp(min=1)
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.17 * len(rows)), layout="constrained")
    for backward, colours in ((False, "Blues"), (True, "Oranges")):
        chosen = torch.tensor([one.backward == backward for one in rows])
        seen = shares.sqrt().where(chosen.unsqueeze(1) & (part > 0), math.nan)  # sqrt, so that small counts are visible
        extent = (low, high, len(rows) - 0.5, -0.5)
        axes.imshow(
            seen.numpy(), cmap=colours, vmin=-0.25, vmax=1, aspect="auto", extent=extent, interpolation="nearest"
        )
    lines = {"zero below": known.underflow, "subnormal below": known.tiny, "largest": known.max}
    for label, bound in lines.items():
        if low <= math.log2(bound) <= high:
            axes.axvline(math.log2(bound), color="black", linewidth=0.8, linestyle="--")
            axes.text(math.log2(bound), -0.8, label, ha="center", va="bottom", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{'<-' if one.backward else '->'} {one.label}" for one in rows], fontsize=6)
    for index, one in enumerate(rows):
        if one.failed:
            axes.get_yticklabels()[index].set_color("red")
    title = f"{name_of(dtype)}: exponents in the forward pass (blue) and the backward pass (orange)"
    axes.set_title(title + (f"; {left_out} more left out" if left_out > 0 else ""), fontsize=9, pad=14)
    axes.set_xlabel("exponent of 2")
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
    kept = list(history)
    if not kept:
        raise ValueError("plot_flushed: history must hold a step; got none")
    names = list(kept[0][1])
    for step, records in kept:
        if list(records) != names or not names:
            raise ValueError(f"plot_flushed: history must have the same layers at every step; step {step} differs")
    plt = _pyplot("plot_flushed")
    flushed = torch.stack(
        [torch.stack([records[name].backward.total().underflow(dtype).cpu() for name in names]) for _, records in kept],
        1,
    )
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.2 * len(names)), layout="constrained")
    image = axes.imshow(
        flushed.numpy(),
        aspect="auto",
        cmap="magma_r",
        vmin=0,
        vmax=max(0.01, flushed.max().item()),
        interpolation="nearest",
    )
    shown = range(0, len(kept), max(1, len(kept) // 12))
    axes.set_xticks(list(shown), [kept[index][0] for index in shown])
    axes.set_yticks(range(len(names)), [name or "(module)" for name in names], fontsize=7)
    axes.set_xlabel("step")
    axes.set_title(f"fraction of each layer's gradient that {name_of(dtype)} flushes to zero", fontsize=9)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return Path(path)
