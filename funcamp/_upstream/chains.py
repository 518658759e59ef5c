"""Follow the nodes of a graph back to what they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import Argument, map_arg


def chain_start(node: Any, follow: Callable[[fx.Node], bool] = lambda _: True) -> Any:
    """Return the start of a chain of operations on one tensor, any of which may be a view or be removed.

    Args:
        node: the end of the chain, or an argument that is no node: then it is returned.
        follow: whether an operation is part of the chain.
    """
    while isinstance(node, fx.Node) and node.op == "call_function" and follow(node):
        sources = node.all_input_nodes
        if len(sources) != 1:
            break
        (node,) = sources
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether an operation's result may share memory with its argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info for result in schema.returns)


def nodes_behind(
    values: Argument, before: Callable[[fx.Node], list[fx.Node]] = lambda node: node.all_input_nodes
) -> set[fx.Node]:
    """Return the nodes among values, and those from which they are computed; `before` returns one step of these."""
    pending: list[fx.Node] = []
    map_arg(values, pending.append)
    nodes = set(pending)
    while pending:
        new_nodes = [node for node in before(pending.pop()) if node not in nodes]
        nodes.update(new_nodes)
        pending += new_nodes
    return nodes
