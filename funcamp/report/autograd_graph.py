"""What autograd's graph of a loss shows: its leaves, its scaler, the dtypes of its operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from funcamp.report.events import Key

#: The starts of the names of nodes of operations that autocast runs in 16 bits.
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "Linear", "MkldnnLinear", "MkldnnConv")
#: The entry of a node's metadata that has the scaling of its loss.
_SCALING_ENTRY = "funcamp_scaling"
_DTYPES_OF_16_BITS = (torch.float16, torch.bfloat16)


class Scaling(NamedTuple):
    """How a loss was scaled."""

    scaler: Key
    updates: int
    """How many updates the scaler had had."""


class Graph(NamedTuple):
    """What the graph of a loss, or of several, shows."""

    leaves: list[Tensor]
    scaling: Scaling | None
    dtypes: frozenset[torch.dtype]
    has_products: bool
    """Whether matrices were multiplied, or a convolution computed."""


def mark_scaled(node: Node, scaling: Scaling) -> None:
    """Write into the node of a scaled loss how it was scaled.

    The node's own metadata needs no reference from the auditor, which would keep the graph alive.
    """
    _metadata_of(node)[_SCALING_ENTRY] = scaling


def _scaling_of(node: Node) -> Scaling | None:
    return _metadata_of(node).get(_SCALING_ENTRY)


def _metadata_of(node: Node) -> dict[str, Scaling]:
    return cast("dict[str, Scaling]", node.metadata)  # torch declares a method; it is a dict


def read_graph(outputs: Iterable[Tensor]) -> Graph:
    """Walk the graph of some losses."""
    leaves: list[Tensor] = []
    scaling: Scaling | None = None
    dtypes: set[torch.dtype] = set()
    has_products = False
    for node in nodes_from(output.grad_fn for output in outputs):
        if scaling is None:
            scaling = _scaling_of(node)
        if hasattr(node, "variable"):  # a node that accumulates the gradient of a leaf
            leaves.append(node.variable)
        else:
            dtypes |= _dtypes_of(node)
            has_products |= node.name().startswith(_PRODUCTS)
    return Graph(leaves, scaling, frozenset(dtypes), has_products)


def nodes_from(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Yield the nodes of a graph, each once."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend([next_node for next_node, _ in node.next_functions])


def is_scaled(output: Tensor) -> bool:
    """Return whether a loss is the result of `scaler.scale`, or a cast of it."""
    node = output.grad_fn
    while node is not None and node.name().startswith("ToCopy"):
        node = node.next_functions[0][0]
    return node is not None and _scaling_of(node) is not None


def _dtypes_of(node: Node) -> set[torch.dtype]:
    """Return the 16-bit dtypes of a node's outputs; none if this torch has no such metadata."""
    outputs = getattr(node, "_input_metadata", ())
    return {output.dtype for output in outputs if output.dtype in _DTYPES_OF_16_BITS}
