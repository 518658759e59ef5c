"""Registration of a pass over a step's graph, so that `jit` can run the pass of a later room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """A pass over the graph of a step, before Inductor's own."""

    usable: Callable[[], bool]
    """Return whether torch has what it needs."""
    tracing: Callable[[], contextlib.AbstractContextManager[None]]
    """Return a context manager for tracing graphs that it will change."""
    make: Callable[[], Any]
    """Return a `CustomGraphPass`."""


_registered: list[Pass] = []


def register(one: Pass) -> None:
    """Register a pass for all steps compiled from now on; Inductor supports only one."""
    if _registered:
        raise RuntimeError("register: one pass must be the only one; compose it with the one that is there")
    _registered.append(one)


def registered() -> Pass | None:
    """Return the pass, if one is registered and torch has what it needs."""
    return next((one for one in _registered if one.usable()), None)
