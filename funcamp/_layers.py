"""The one place in which the core finds a layer: when an argument names it, as `probes=` does.

A layer (float8, numerics, distributed) imports the core; the core imports no layer. What the core asks of one is a
protocol beside the code that calls it: `Taps` in `_autograd/tape.py`.
"""

from __future__ import annotations

import importlib
from typing import Any


def layer(module: str) -> Any:
    """Import a module of a layer, such as "numerics.record"; the caller gives what it takes a protocol's type."""
    return importlib.import_module(f"funcamp.{module}")
