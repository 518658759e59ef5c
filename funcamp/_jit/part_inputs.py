"""Pass the parts of small flat tensors to a program as inputs of their own.

The biases and norms of all blocks of a model are parts of one flat tensor. Inductor writes the offset of a part into
the code of every kernel that reads it, so the kernels of equal blocks differ, and each is compiled. A part that is an
input has an address instead, and equal kernels are compiled once.

Inductor does not know that such inputs share memory. So the program does not write that memory: the new value of the
flat tensor is a result, which is copied after the program.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp import _tree

#: The largest flat tensor, in bytes, that is worth another copy in every step.
SMALL = 1 << 20
#: The number of parts from which on a model has equal blocks.
MANY = 16

_aten = torch.ops.aten


class FlatInput(NamedTuple):
    """A flat tensor whose parts are inputs."""

    place: int
    """Its number among the inputs."""
    sizes: tuple[int, ...]
    chosen: list[int]
    """The numbers of the parts that are inputs."""
    written: bool
    """Whether its new value is a result."""


def part_inputs(module: fx.GraphModule, examples: list[Tensor], mode: AbstractContextManager[Any]) -> list[FlatInput]:
    """Make the parts of small flat inputs inputs of a graph, after all others; return these flat tensors.

    Args:
        module: its graph is changed in place; not recompiled. New values of flat tensors become its last results.
        examples: fake tensors like its inputs; extended.
        mode: their mode.
    """
    graph = module.graph
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    writes = {node.args[0]: node for node in copies if node.args[0].op == "placeholder"}
    output = graph.output_node()
    whole: Any = output.args[0]
    results = list(whole)
    # A result may share the memory of an input, because Inductor removes copies.
    apart = {_root(value) for value in [*results, *[node.args[1] for node in writes.values()]]}
    last = set(writes.values())
    apart |= {_root(value, views=True) for node in graph.nodes if node not in last for value in _written(node)}
    found = []
    for place, (node, example) in enumerate(zip(graph.find_nodes(op="placeholder"), list(examples))):
        if example.dim() != 1 or example.nbytes > SMALL or node in apart:
            continue
        splits = [user for user in node.users if user.target is _aten.split_with_sizes.default]
        sizes = {tuple(split.args[1]) for split in splits}
        parts = [part for split in splits for part in split.users if _is_vector(part)]
        chosen = sorted({part.args[1] for part in parts})
        if len(sizes) != 1 or len(chosen) < MANY:
            continue
        flat = FlatInput(place, sizes.pop(), chosen, node in writes)
        with mode:
            new = [torch.empty(flat.sizes[n], dtype=example.dtype, device=example.device) for n in chosen]
        made = dict(zip(chosen, _further_inputs(graph, f"part_of_{node.name}", new)))
        examples += new
        for part in parts:
            part.replace_all_uses_with(made[part.args[1]])
            graph.erase_node(part)
        if flat.written:
            results.append(writes[node].args[1])
            graph.erase_node(writes[node])
        found.append(flat)
    output.args = (results,)
    return found


def _further_inputs(graph: fx.Graph, name: str, examples: list[Tensor]) -> list[fx.Node]:
    made = [graph.find_nodes(op="placeholder")[-1]]
    for number, example in enumerate(examples):
        with graph.inserting_after(made[-1]):
            made.append(graph.placeholder(f"{name}_{number}"))
        made[-1].meta = {"val": example}
    return made[1:]


def _is_vector(part: fx.Node) -> bool:
    """Return whether generated kernels may read a part; matrices are read by a library, which gets their address."""
    shapes: list[Any] = [user.args[1] for user in part.users if user.target is _aten.view.default]
    return all(len(shape) < 2 for shape in shapes)


def parts_of(flats: list[FlatInput], inputs: list[Tensor]) -> list[Tensor]:
    """Return the further inputs of a program that has these."""
    found = []
    for flat in flats:
        parts = inputs[flat.place].split_with_sizes(flat.sizes)
        found += [parts[number] for number in flat.chosen]
    return found


def write_back(flats: list[FlatInput], inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Give the flat tensors their new values, the last results of the program; return the others."""
    written = [inputs[flat.place] for flat in flats if flat.written]
    first = len(results) - len(written)
    for tensor, value in zip(written, results[first:]):
        tensor.copy_(value)
    return results[:first]


def _written(node: fx.Node) -> list[Any]:
    """Return the arguments that an operation writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, node.args), *((one, node.kwargs.get(one.name)) for one in schema.arguments)]
    return [leaf for one, value in given if one.is_write for leaf in _tree.leaves(value)]


def _root(node: Any, *, views: bool = False) -> Any:
    """Return the start of a chain of operations on one tensor: of any, which may be removed, or of views."""
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        schema = getattr(node.target, "_schema", None)
        if views and schema is not None and not any(result.alias_info for result in schema.returns):
            break
        node = node.all_input_nodes[0]
    return node
