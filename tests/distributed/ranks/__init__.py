"""What several processes do together; tests/distributed/test_distributed.py starts them and reads what they found."""

from __future__ import annotations

import importlib
from collections.abc import Callable

#: Each case, and in groups of how many processes it runs, by name.
CASES: dict[str, tuple[tuple[int, ...], Callable[[], None]]] = {}


def case(*worlds: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark a function that every rank calls, in groups of these sizes."""

    def mark(fn: Callable[[], None]) -> Callable[[], None]:
        CASES[f"{fn.__module__.rsplit('.', 1)[1]}.{fn.__name__}"] = (worlds, fn)
        return fn

    return mark


for _name in ("functions", "step", "loops", "checkpoint"):
    importlib.import_module(f"tests.distributed.ranks.{_name}")
