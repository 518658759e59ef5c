"""Add an operation to a traced graph."""

from __future__ import annotations

from typing import Any

from torch import fx


def emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Add an operation where the graph inserts, with its value; inside of the mode of the program's examples."""
    node = graph.call_function(target, args, kwargs)
    example_args = fx.map_arg(args, lambda argument: argument.meta["val"])
    node.meta["val"] = target(*example_args, **kwargs)
    return node
