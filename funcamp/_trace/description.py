"""What a graph computes, as a value: two traces of one step with equal descriptions are one program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph


def description_of(graph: Graph) -> bytes:
    """Return a description of what a graph returns, writes and draws; not of the tensors that it captures.

    Not in it: operations on which nothing depends, such as those for a log.
    """
    live = live_nodes(graph)
    text = hashlib.sha256()
    for part in _described(graph.module, [node for node in graph.module.graph.nodes if node in live or _acts(node)]):
        text.update(part)
    return text.digest()


def _acts(node: fx.Node) -> bool:
    """Return whether an operation does something besides what it returns: it draws numbers, or is a user's own."""
    namespace = getattr(node.target, "namespace", None)
    if node.op != "call_function" or namespace is None:
        return False
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return draws or namespace not in ("aten", "prim", "prims")


def live_nodes(graph: Graph) -> dict[fx.Node, None]:
    """Return the nodes that a result or a written input depends on, in their order."""
    nodes = graph.module.graph
    live = graph.aliases.nodes_behind(nodes.output_node(), *graph.aliases.writers_of_inputs())
    return dict.fromkeys(node for node in nodes.nodes if node in live)


def written_inputs(graph: Graph) -> list[int]:
    """Return the numbers of a graph's inputs that it writes."""
    written = graph.aliases.writers.keys()
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    return [number for number, node in enumerate(placeholders) if node in written]


def changed_state(graph: Graph) -> set[int]:
    """Return the numbers of the state's leaves that have other values after a step."""
    nodes = graph.module.graph
    state = [node for node, role in zip(nodes.find_nodes(op="placeholder"), graph.roles) if role == "state"]
    results: Any = nodes.output_node().args[0]
    changed = graph.aliases.changed_inputs(state, results[: graph.outputs.next_state_count])
    return {number for number, node in enumerate(state) if node in changed}


def _described(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> Iterator[bytes]:
    """Yield each node as a text, and what is behind the names of constants.

    A node has its number in place of its name, which follows from operations that are left out, too.
    """
    numbers: dict[fx.Node, str] = {}
    for node in nodes:
        numbers[node] = f"%{len(numbers)}"
        inputs = fx.map_arg((node.args, node.kwargs), lambda argument: numbers.get(argument, argument.name))
        yield f"{node.op} {node.target} {inputs}\n".encode()
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target), None)
        if isinstance(value, Tensor):
            yield _bytes_of(value)


def _bytes_of(constant: Tensor) -> bytes:
    """Return the dtype, shape and contents of a constant, such as that of `torch.tensor([1.0, 2.0])`."""
    header = f"{constant.dtype}{tuple(constant.shape)}".encode()
    contents = constant.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return header + contents.numpy().tobytes()
