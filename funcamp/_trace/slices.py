"""Views of parts of a tensor, which a trace records without dispatching operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funcamp._trace.tracing import RequestedViews, running


def slices(tensor: Tensor, sizes: Sequence[int], requested: RequestedViews) -> list[Tensor]:
    """Return views of consecutive parts of a one-dimensional tensor.

    In a trace they have an offset of zero, because torch computes what an operation returns once for every offset of
    its arguments, and so once for every block of a model.

    Args:
        tensor: the tensor.
        sizes: the sizes of its parts.
        requested: the views.
    """
    recorder = running()
    recorded = None if recorder is None else recorder.slices(tensor, sizes, requested)
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
