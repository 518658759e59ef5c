"""Scalar metrics of a step on a GPU: one tensor for each dtype, so that one copy returns all of them.

After the replay of a CUDA graph every result is copied, because the next replay overwrites it. A copy takes the device
as long as a small kernel, and the host longer. A step that is called without a graph is the same program, so that its
roundings are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from funcamp._trace.trace import Graph
from funcamp._types import Tree

#: The dtypes of which a step has several scalars: losses, norms and scales; counts.
_PACKED_DTYPES = (torch.float32, torch.int64)


def with_packed_metrics(graph: Graph) -> Graph:
    """Return a graph whose scalar metrics are in stacks; its outputs take them out again.

    One of distributed tensors, or for a CPU, is returned as it is.

    Args:
        graph: a traced step; changed.
    """
    if graph.has_subclasses:
        return graph
    output = graph.module.graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    state_count = graph.outputs.next_state_count
    metrics = results[state_count:]
    # A scalar on the host is a constant: the trace refuses host values that could change.
    stacked = _numbers_to_stack(metrics)
    if not stacked:
        return graph
    in_stacks = {number for numbers in stacked for number in numbers}
    alone = [number for number in range(len(metrics)) if number not in in_stacks]
    # Not at the end, where the writes into the state must be.
    last_metric = max(metrics, key=list(graph.module.graph.nodes).index)
    with graph.module.graph.inserting_after(last_metric):
        stacks = [_stack(graph, [metrics[number] for number in numbers]) for numbers in stacked]
    output.args = ([*results[:state_count], *(metrics[number] for number in alone), *stacks],)

    build = graph.outputs.build_metrics

    def build_from_packed(tensors: Iterator[Tensor]) -> Tree:
        """Build the metrics from those that are alone, then the stacks."""
        ordered: list[Tensor | None] = [None] * len(metrics)
        for number in alone:
            ordered[number] = next(tensors)
        for numbers in stacked:
            for number, scalar in zip(numbers, next(tensors).unbind()):
                ordered[number] = scalar
        return build(iter(ordered))  # type: ignore[arg-type]  # every number is in one of the lists

    return graph._replace(
        wrappers=[None] * len(output.args[0]),
        outputs=graph.outputs._replace(build_metrics=build_from_packed),
    )


def _has_expensive_copies(device: torch.device) -> bool:
    return device.type == "cuda"


def _numbers_to_stack(metrics: list[fx.Node]) -> list[list[int]]:
    """Return the numbers of the scalars on a GPU: those of one device and dtype in one list, if there are several."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for number, node in enumerate(metrics):
        value = node.meta["val"]
        if not value.dim() and _has_expensive_copies(value.device) and value.dtype in _PACKED_DTYPES:
            alike[value.device, value.dtype].append(number)
    return [numbers for numbers in alike.values() if len(numbers) > 1]


def _stack(graph: Graph, nodes: list[fx.Node]) -> fx.Node:
    """Insert the stack of some scalars."""
    stack = graph.module.graph.call_function(torch.ops.aten.stack.default, (nodes,))
    with graph.mode:
        stack.meta["val"] = torch.stack([node.meta["val"] for node in nodes])
    return stack
