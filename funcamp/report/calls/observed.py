"""A function of torch whose calls are observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

#: A function of torch that is replaced.
Function: TypeAlias = Callable[..., object]
#: Gets a function of torch and the arguments of its call, and calls it.
Handler: TypeAlias = Callable[..., object]


class Observed(NamedTuple):
    """A function of torch whose calls are observed."""

    owner: object
    """The module or class that has it."""
    name: str
    handler: Handler
