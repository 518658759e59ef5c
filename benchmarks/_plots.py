"""Pictures of results, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path


def dots(stem: Path | None, points: Iterable[tuple[str, str, float]], label: str, ours: str) -> None:
    """A row of dots for each size, a colour for each variant; ours are the diamonds.

    Args:
        stem: the path without its suffix; nothing is drawn without one.
        points: size, variant, number.
        label: what the number is.
        ours: how the names of funcamp's own variants begin.
    """
    if stem is None or importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter

    points = list(points)
    sizes = list(dict.fromkeys(size for size, _, _ in points))
    names = list(dict.fromkeys(name for _, name, _ in points))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.55 * len(sizes)))
    for index, name in enumerate(names):
        own = [(number, sizes.index(size)) for size, variant, number in points if variant == name]
        x, y = zip(*own)
        marker, area = ("D", 70) if name.startswith(ours) else ("o", 40)
        axes.scatter(x, y, label=name, color=f"C{index % 10}", marker=marker, s=area, alpha=0.85)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(sizes)), sizes)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlabel(label)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(stem.with_suffix(".png"), dpi=120, bbox_inches="tight")
    plt.close(figure)


def bands(stem: Path | None, panels: dict[str, dict[str, list[list[float]]]], every: int, label: str) -> None:
    """Curves over several seeds, panels side by side: their mean, between the lowest and the highest.

    Args:
        stem: the path without its suffix; nothing is drawn without one.
        panels: by the name of the numbers, and by the variant, a curve of each seed. A panel whose numbers are all
            above 0 is logarithmic.
        every: the steps between two points.
        label: what the steps are.
    """
    if stem is None or importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib.pyplot as plt

    figure, row = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.8), layout="constrained")
    for axes, (name, variants) in zip(row, panels.items()):
        for index, (variant, runs) in enumerate(variants.items()):
            columns = list(zip(*runs))
            steps = [every * (place + 1) for place in range(len(columns))]
            axes.fill_between(steps, [*map(min, columns)], [*map(max, columns)], color=f"C{index}", alpha=0.15)
            axes.plot(steps, [sum(column) / len(column) for column in columns], color=f"C{index}", label=variant)
        if all(value > 0 for runs in variants.values() for run in runs for value in run):
            axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    row[0].legend(fontsize=8)
    figure.savefig(stem.with_suffix(".png"), dpi=120)
    plt.close(figure)
