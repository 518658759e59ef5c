"""torch's own database of optimizers and their inputs, which its tests use."""

from __future__ import annotations

from typing import Any

from tests.support.databases import internal


def optimizer_database() -> list[Any]:
    """Return the database."""
    return list(internal("common_optimizers").optim_db)
