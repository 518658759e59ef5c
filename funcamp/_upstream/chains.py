"""Follow the nodes of a graph back to what they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch.fx.node import Argument


@overload
def chain_start(node: torch.fx.Node, follow: Callable[[torch.fx.Node], bool] = ...) -> torch.fx.Node: ...
@overload
def chain_start(node: object, follow: Callable[[torch.fx.Node], bool] = ...) -> object: ...
def chain_start(node: object, follow: Callable[[torch.fx.Node], bool] = lambda _: True) -> object:
    """Return the start of a chain of operations on one tensor, any of which may be a view or be removed."""
    while (
        isinstance(node, torch.fx.Node)
        and node.op == "call_function"
        and len(node.all_input_nodes) == 1
        and follow(node)
    ):
        node = node.all_input_nodes[0]
    return node


def is_view(node: torch.fx.Node) -> bool:
    """Return whether an operation's result may share memory with its argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info for result in schema.returns)


def nodes_behind(
    values: Argument, before: Callable[[torch.fx.Node], list[torch.fx.Node]] = lambda node: node.all_input_nodes
) -> set[torch.fx.Node]:
    """Return the nodes among values, and those from which they are computed; `before` returns one step of these."""
    pending: list[torch.fx.Node] = []
    torch.fx.map_arg(values, pending.append)
    nodes = set(pending)
    while pending:
        new_nodes = [node for node in before(pending.pop()) if node not in nodes]
        nodes.update(new_nodes)
        pending += new_nodes
    return nodes
