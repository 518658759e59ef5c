"""torch's own database of optimizers and their inputs, which its tests use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import unittest
from typing import Any


def optimizer_database() -> list[Any]:
    """Import the database; its modules import expecttest, which nothing in it uses."""
    missing = importlib.util.find_spec("expecttest") is None
    if missing:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        database = importlib.import_module("torch.testing._internal.common_optimizers").optim_db
    finally:
        if missing:
            del sys.modules["expecttest"]
    return list(database)
