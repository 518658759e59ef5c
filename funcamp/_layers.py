"""The one place in which the core finds a layer: for `probes=` of a loss, for `run.save`, and for passes of `jit`.

A layer (float8, numerics, distributed) imports the core; the core imports no layer. What the core asks of one is a
protocol beside the code that calls it: `Taps` in `_autograd/loss.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

_modules_with_passes: list[str] = []


def layer(module: str) -> Any:
    """Import a module of a layer, such as "numerics.record"; the caller gives what it takes a protocol's type."""
    return importlib.import_module(f"funcamp.{module}")


def register_passes(module: str) -> None:
    """Let all programs that are compiled from now on have the `PASSES` of a module of a layer.

    It is imported with torch's compiler, which takes seconds.
    """
    if module not in _modules_with_passes:
        _modules_with_passes.append(module)


def passes_of_layers() -> list[Any]:
    """Return these passes."""
    return [one for module in _modules_with_passes for one in layer(module).PASSES]
