"""The description of a workaround that changes torch while a program is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from funcamp._upstream import Defect


class Bug(NamedTuple):
    """A defect of torch that is worked around by changing torch while a program is compiled."""

    name: str
    why: str
    """What is wrong in torch, in one line; printed by `jit(..., explain=True)` and `doctor`."""
    evidence: str
    """The test that shows it, or torch's issue."""
    defect: Defect
    """The versions that have it."""
    changed: Callable[[], AbstractContextManager[None]]
    """Returns a context manager: torch without the defect."""
