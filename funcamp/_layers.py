"""The one place in which the core finds a layer: when an argument names it, as `policy="float8"` and `probes=` do.

A layer (float8, numerics, distributed) imports the core; the core imports no layer. What the core asks of one is a
protocol beside the code that calls it: `ProductConfig` in `_storage/policy.py`, `Taps` in `_autograd/tape.py`,
`Products` in `_step/products.py`.
"""

from __future__ import annotations

import importlib
from typing import Any


def layer(module: str) -> Any:
    """Import a module of a layer, such as "float8.layers"; the caller gives what it takes from it a protocol's type."""
    return importlib.import_module(f"funcamp.{module}")
