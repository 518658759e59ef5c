"""What the graph behind a loss says: its leaves, its scaler, its dtypes and its form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._audit.events import Form

#: The nodes of losses that are means if their reduction is 1.
_REDUCED = ("Loss", "CrossEntropy")
_MEAN = 1
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
    form: Form


def read_graph(outputs: Iterable[Tensor], scaled: Mapping[Any, Scaling]) -> Graph:
    """Walk the graph behind some outputs.

    Args:
        outputs: the losses.
        scaled: how the losses of these nodes were scaled.
    """
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
            scaling = scaled.get(node)
        if hasattr(node, "variable"):  # a node that accumulates the gradient of a leaf
            leaves.append(node.variable)
        else:
            dtypes |= _dtypes_of(node)
        stack.extend([next_node for next_node, _ in node.next_functions])
    form = _form_of(roots[0], scaled) if len(roots) == 1 else Form.OTHER
    return Graph(leaves, scaling, frozenset(dtypes), form)


def _dtypes_of(node: Any) -> set[torch.dtype]:
    """Return the dtypes of 16 bits of a node's outputs; none if this torch does not say."""
    return {output.dtype for output in getattr(node, "_input_metadata", ()) if output.dtype in _HALF}


def _form_of(root: Any, scaled: Mapping[Any, Scaling]) -> Form:
    """Return how a loss comes out of its last operation, apart from scaling and casts."""
    node = root
    while node in scaled or node.name().startswith("ToCopy"):
        node = node.next_functions[0][0]
        if node is None:
            return Form.OTHER
    name = node.name()
    is_loss = any(word in name for word in _REDUCED) and getattr(node, "_saved_reduction", None) == _MEAN
    return Form.MEAN if is_loss or name.startswith("MeanBackward") else Form.OTHER
