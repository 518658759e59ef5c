"""Give values to tensors of a trace that Python keeps, for example in a module's cache.

A trace runs the step's Python on tensors without values. A mask or a table of positions that a module creates at its
first call and keeps is then such a tensor. The part of the graph that created it is computed, and the result is put in
its place. A tensor that follows from what changes from call to call has no value there, but is on `meta`: a run that
reads it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.aliases import Aliases
from funcamp._trace.interface import Outputs, Role
from funcamp._trace.places import Place
from funcamp._upstream.fake_tensors import FakeTensor

#: Returns the node of a tensor in the graph that is traced; None for any other tensor.
NodeOf: TypeAlias = Callable[[Tensor], "fx.Node | None"]


def give_values_to_kept(
    places: Iterable[Place],
    node_of: NodeOf,
    module: fx.GraphModule,
    roles: Sequence[Role],
    values: Sequence[Tensor],
    outputs: Outputs,
) -> None:
    """Put values in the place of the tensors of a trace that Python keeps, those that they have after the step.

    Args:
        places: where Python may keep them.
        node_of: returns the node of a tensor of the trace.
        module: the trace.
        roles: what each of its inputs is.
        values: the values of its inputs.
        outputs: what its results are.
    """
    places = [place for place in places if _tensors_of_trace(place.now(), node_of)]
    kept = {id(tensor): tensor for place in places for tensor in _tensors_of_trace(place.now(), node_of)}
    if not kept:
        return
    graph = module.graph
    aliases = Aliases(graph)
    placeholders = graph.find_nodes(op="placeholder")
    state = [node for node, role in zip(placeholders, roles) if role == "state"]
    batch = {node for node, role in zip(placeholders, roles) if role == "batch"}
    results: Any = graph.output_node().args[0]
    changing = batch | aliases.changed_inputs(state, results[: outputs.next_state_count])

    # Those that are the same at every call, and that are computed without a write into an input.
    constant: dict[int, fx.Node] = {}
    for tensor_id, tensor in kept.items():
        node: Any = node_of(tensor)
        writes_inputs = not aliases.nodes_behind(node).isdisjoint(aliases.writers_of_inputs())
        if not writes_inputs and not aliases.follows(node, changing):
            constant[tensor_id] = node

    # What they need, in the order of the graph, as some nodes write what others read.
    needed = aliases.nodes_behind(*constant.values())
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.env.update(zip(placeholders, values))
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for node in graph.nodes:
            if node in needed and node not in interpreter.env:
                interpreter.env[node] = interpreter.run_node(node)

    replacements: dict[int, Tensor] = {}
    for tensor_id, tensor in kept.items():
        if tensor_id not in constant:
            # 0 for a size that follows from values.
            sizes = [size if isinstance(size, int) else 0 for size in tensor.shape]
            replacements[tensor_id] = torch.empty(sizes, dtype=tensor.dtype, device="meta")
            continue
        node = constant[tensor_id]
        value = interpreter.env[node].detach()
        is_in_state = aliases.root[node] in state  # whose memory programs write
        replacements[tensor_id] = value.clone() if is_in_state else value
    for place in places:
        leaves, spec = _tree.flatten(place.now())
        place.put(_tree.unflatten([replacements.get(id(leaf), leaf) for leaf in leaves], spec))


def _tensors_of_trace(value: object, node_of: NodeOf) -> list[Tensor]:
    """Return the tensors of a trace in a value: itself, or those in a tuple."""
    leaves = _tree.leaves(value) if isinstance(value, (Tensor, tuple)) else []
    return [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and node_of(leaf) is not None]
