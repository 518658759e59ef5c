"""Where a graph, as it was traced, writes: a donated step ends with copies into the leaves of the state."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from funcamp._trace.aliases import Aliases


def writes_input(node: fx.Node) -> bool:
    """Return whether a node gives an input of the graph a new value."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    target = node.args[0]
    return isinstance(target, fx.Node) and target.op == "placeholder"


def written_early(graph: fx.Graph, aliases: Aliases) -> set[fx.Node]:
    """Return the roots of all memory that a graph writes before the copies into inputs with which it ends.

    A pass may move a read of any other memory.
    """
    nodes_before_output = itertools.islice(reversed(graph.nodes), 1, None)
    last_writes = {*itertools.takewhile(lambda node: writes_input(node) and not node.users, nodes_before_output)}
    return {root for root, writers in aliases.writers.items() if not last_writes.issuperset(writers)}
