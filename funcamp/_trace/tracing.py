"""The trace that runs in this thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

#: For every view the number of its part, and its shape of at most as many elements.
Wanted: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]


class HostError(Exception):
    """The function leaves the arguments' type of device, reads a value on the host, or keeps state in Python."""


class Recorder(Protocol):
    """A trace that is running."""

    def slices(self, tensor: Tensor, sizes: Sequence[int], wanted: Wanted) -> list[Tensor] | None:
        """Record views; None for a tensor of no or another trace, and where derivatives have to pass."""


class _Current(threading.local):
    recorder: Recorder | None = None


current = _Current()
"""The trace of this thread."""


def running() -> Recorder | None:
    """Return the trace of this thread; None if there is none, or if Dynamo compiles."""
    return None if torch.compiler.is_dynamo_compiling() else current.recorder


def compiling() -> bool:
    """Return whether Dynamo or a trace of this thread records what is called, also if the model does not know it."""
    return torch.compiler.is_dynamo_compiling() or current.recorder is not None
