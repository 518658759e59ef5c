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
