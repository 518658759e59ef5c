"""What a traced step writes: its state, and nothing else."""

from __future__ import annotations

from funcamp._trace.aliases import Aliases
from funcamp._trace.trace import Graph

_KINDS = {"batch": "its batch", "captured": "a tensor that it reads besides its arguments"}


def check_writes(graph: Graph) -> bool:
    """Return whether a traced step gives the state new values.

    In eager code a write into one tensor shows in every tensor over the same memory; a program assumes that its inputs
    share none.

    Raises:
        RuntimeError: it writes another input.
    """
    written = {memory for memory in Aliases(graph.module.graph).writers if memory.op == "placeholder"}
    writes_state = bool(graph.outputs.next_state_count)
    for node, graph_input in zip(graph.module.graph.find_nodes(op="placeholder"), graph.inputs):
        if node not in written:
            continue
        if graph_input.kind != "state":
            raise RuntimeError(
                f"jit: step must write into nothing but its state; it writes into {_KINDS[graph_input.kind]}, a "
                f"{node.meta['val'].dtype} tensor of shape {tuple(node.meta['val'].shape)}: write into a clone()"
            )
        writes_state = True
    return writes_state
