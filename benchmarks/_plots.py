"""Pictures of results, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path


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
