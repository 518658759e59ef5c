"""What the graph behind a loss says: its leaves, its scaler, its dtypes and its form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._audit.events import Reduction

#: The nodes of losses that are means if their reduction is 1.
_REDUCED = ("Loss", "CrossEntropy")
_MEAN = 1
#: Where a node's metadata says how its loss was scaled.
_KEY = "funcamp_scaling"
_HALF = (torch.float16, torch.bfloat16)


class Scaling(NamedTuple):
    """How a loss was scaled."""

    scaler: int
    updates: int
    """How many updates the scaler had had."""


class Graph(NamedTuple):
    """What is behind a loss."""

    leaves: list[Tensor]
    scaling: Scaling | None
    dtypes: frozenset[torch.dtype]
    reduction: Reduction


def mark_scaled(node: Any, scaling: Scaling) -> None:
    """Write into the node of a scaled loss how it was scaled. The node, and its graph, is not kept."""
    node.metadata[_KEY] = scaling


def _scaling_of(node: Any) -> Scaling | None:
    scaling: Scaling | None = node.metadata.get(_KEY)
    return scaling


def read_graph(outputs: Iterable[Tensor]) -> Graph:
    """Walk the graph behind some losses."""
    leaves: list[Tensor] = []
    scaling: Scaling | None = None
    dtypes: set[torch.dtype] = set()
    seen: set[Any] = set()
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    stack: list[Any] = [*roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if scaling is None:
            scaling = _scaling_of(node)
        if hasattr(node, "variable"):  # a node that accumulates the gradient of a leaf
            leaves.append(node.variable)
        else:
            dtypes |= _dtypes_of(node)
        stack.extend([next_node for next_node, _ in node.next_functions])
    reduction = _reduction_of(roots[0]) if len(roots) == 1 else Reduction.OTHER
    return Graph(leaves, scaling, frozenset(dtypes), reduction)


def _dtypes_of(node: Any) -> set[torch.dtype]:
    """Return the dtypes of 16 bits of a node's outputs; none if this torch does not say."""
    return {output.dtype for output in getattr(node, "_input_metadata", ()) if output.dtype in _HALF}


def _reduction_of(root: Any) -> Reduction:
    """Return how a loss comes out of its last operation, apart from scaling and casts."""
    node = root
    while _scaling_of(node) is not None or node.name().startswith("ToCopy"):
        node = node.next_functions[0][0]
        if node is None:
            return Reduction.OTHER
    name = node.name()
    is_loss = any(word in name for word in _REDUCED) and getattr(node, "_saved_reduction", None) == _MEAN
    return Reduction.MEAN if is_loss or name.startswith("MeanBackward") else Reduction.OTHER
