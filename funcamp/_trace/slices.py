"""Views of parts of a tensor, which a trace records without dispatching operations."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

#: For every view the number of its part, and its shape of at most as many elements.
Wanted: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]


class Recorder(Protocol):
    """A trace that is running."""

    def slices(self, tensor: Tensor, sizes: Sequence[int], wanted: Wanted) -> list[Tensor] | None:
        """Record views; None for a tensor of no or another trace, and where derivatives have to pass."""


class _Current(threading.local):
    recorder: Recorder | None = None


current = _Current()
"""The trace of this thread."""


def slices(tensor: Tensor, sizes: Sequence[int], wanted: Wanted) -> list[Tensor]:
    """Return views of consecutive parts of a one-dimensional tensor.

    In a trace they have an offset of zero, because torch computes what an operation returns once for every offset of
    its arguments, and so once for every block of a model.

    Args:
        tensor: the tensor.
        sizes: the sizes of its parts.
        wanted: the views.
    """
    recorder = None if torch.compiler.is_dynamo_compiling() else current.recorder
    recorded = None if recorder is None else recorder.slices(tensor, sizes, wanted)
    if recorded is not None:
        return recorded
    parts, views = torch.split(tensor, list(sizes)), []
    for number, shape in wanted:
        count = math.prod(shape)
        views.append((parts[number] if sizes[number] == count else parts[number][:count]).view(shape))
    return views
