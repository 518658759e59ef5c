"""The pass over a step's graph that a room above has registered: `jit` runs it and need not know it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """A pass over the graph of a step, before Inductor's own."""

    usable: Callable[[], bool]
    """Whether torch has what it needs."""
    tracing: Callable[[], contextlib.AbstractContextManager[None]]
    """A region in which graphs are traced that it will change."""
    make: Callable[[], Any]
    """From nothing to a `CustomGraphPass`."""


_registered: list[Pass] = []


def register(one: Pass) -> None:
    """Have every step that is compiled from now on go through a pass. Inductor has room for one."""
    if _registered:
        raise RuntimeError("register: one pass must be the only one; compose it with the one that is there")
    _registered.append(one)


def registered() -> Pass | None:
    """The pass, if there is one and torch has what it needs."""
    return next((one for one in _registered if one.usable()), None)
