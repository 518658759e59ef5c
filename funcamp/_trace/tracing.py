"""The trace that runs in this thread, and the views of a flat tensor that it records."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

#: The views that are asked for of consecutive parts of a tensor: of each the number of its part, and its shape of at
#: most as many elements.
RequestedViews: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]


class HostError(Exception):
    """The function does on the host what a program cannot: it reads a value, draws, seeds, or keeps state in Python.

    The text goes on from "jit: step must ", which `trace_step` puts before it.
    """


class Recorder(Protocol):
    """A trace that is running."""

    def slices(self, tensor: Tensor, sizes: Sequence[int], requested: RequestedViews) -> list[Tensor] | None:
        """Record views; None for a tensor of no or another trace, and where derivatives have to pass."""


class _Current(threading.local):
    recorder: Recorder | None = None
    records_views = True


current = _Current()
"""The trace of this thread."""


def running() -> Recorder | None:
    """Return the trace of this thread; None if there is none, or if Dynamo compiles."""
    return None if torch.compiler.is_dynamo_compiling() else current.recorder


def compiling() -> bool:
    """Return whether Dynamo or a trace of this thread records what is called, also if the model does not know it."""
    return torch.compiler.is_dynamo_compiling() or current.recorder is not None


@contextlib.contextmanager
def ordinary_views() -> Iterator[None]:
    """Context manager: `slices` takes ordinary views in a trace too, so that a write into one is seen at the tensor."""
    former = current.records_views
    current.records_views = False
    try:
        yield
    finally:
        current.records_views = former


def slices(tensor: Tensor, sizes: Sequence[int], requested: RequestedViews) -> list[Tensor]:
    """Return views of consecutive parts of a one-dimensional tensor.

    In a trace they have an offset of zero, because torch computes what an operation returns once for every offset of
    its arguments, and so once for every block of a model: a trace took 1.25 times as long with plain views.

    Args:
        tensor: the tensor.
        sizes: the sizes of its parts.
        requested: the views.
    """
    recorder = running()
    recorded = None if recorder is None or not current.records_views else recorder.slices(tensor, sizes, requested)
    if recorded is not None:
        return recorded
    parts = torch.split(tensor, list(sizes))
    views: list[Tensor] = []
    for number, shape in requested:
        part = parts[number]
        count = math.prod(shape)
        if count != sizes[number]:  # the rest is padding
            part = part[:count]
        views.append(part.view(shape))
    return views
