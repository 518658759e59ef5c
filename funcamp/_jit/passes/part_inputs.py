"""Pass the parts of small flat tensors to a program as inputs of their own.

The biases and norms of all blocks of a model are parts of one flat tensor. Inductor writes the offset of a part into
the code of every kernel that reads it, so the kernels of equal blocks differ, and each is compiled. A part that is an
input has an address instead, and equal kernels are compiled once.

Inductor does not know that such inputs share memory. So the program does not write that memory: the new value of the
flat tensor is a result, which is copied after the program.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Flat, Pass, Program
from funcamp._trace.schema import aliased
from funcamp._upstream.chains import chain_start, is_view

#: The largest flat tensor, in bytes, that is worth another copy in every step.
SMALL = 1 << 20
#: The number of parts from which on a model has equal blocks.
MANY = 16

_aten = torch.ops.aten
_STRIDED = (_aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_copy.default)


class FlatInput(NamedTuple):
    """A flat tensor whose parts are inputs."""

    place: int
    """Its number among the inputs."""
    sizes: tuple[int, ...]
    chosen: list[int]
    """The numbers of the parts that are inputs."""
    written: bool
    """Whether its new value is a result."""


def part_inputs(program: Program) -> Program:
    """Return a program in which the parts of small flat inputs are inputs, after all others.

    The new values of such flat inputs are its last results, until the function around it has written them back.
    """
    graph = program.module.graph
    placeholders, last = graph.find_nodes(op="placeholder"), _last_writes(graph)
    candidates = _candidates(graph, program.examples, last)
    if not candidates:
        return program
    output = graph.output_node()
    whole: Any = output.args[0]
    results, examples, flats = list(whole), list(program.examples), list[FlatInput]()
    for place, sizes, nodes in candidates:
        flat_node, example = placeholders[place], examples[place]
        numbers: list[Any] = [node.args[1] for node in nodes]
        flat = FlatInput(place, sizes, sorted(set(numbers)), flat_node in last)
        with program.mode:
            new = [torch.empty(sizes[number], dtype=example.dtype, device=example.device) for number in flat.chosen]
        made = dict(zip(flat.chosen, _append_placeholders(graph, f"part_of_{flat_node.name}", new)))
        examples += new
        for node, number in zip(nodes, numbers):
            node.replace_all_uses_with(made[number])
            graph.erase_node(node)
        if flat.written:
            write = last[flat_node]
            results.append(write.args[1])
            graph.erase_node(write)
        flats.append(flat)
    output.args = (results,)

    def with_parts(inner: Flat) -> Flat:
        return lambda inputs: write_back(flats, inputs, list(inner([*inputs, *further_inputs(flats, inputs)])))

    return program._replace(examples=examples, around=(*program.around, with_parts))


def _candidates(
    graph: fx.Graph, examples: list[Tensor], last: dict[Any, fx.Node]
) -> list[tuple[int, tuple[int, ...], list[fx.Node]]]:
    """Return the number of every small flat input with many parts, the sizes of its parts, and the nodes of vectors."""
    # Inductor may write a value that is another input after that input. Offsets of as_strided count from the flat one.
    apart, writes = {chain_start(node.args[1]) for node in last.values()}, set(last.values())
    for node in graph.nodes:
        if node.target in _STRIDED:
            apart.add(chain_start(node, is_view))
        if node not in writes:
            written = aliased(node.target, node.args, node.kwargs, written=True)
            apart |= {chain_start(value, is_view) for value in written}
    found = []
    for place, (node, example) in enumerate(zip(graph.find_nodes(op="placeholder"), examples)):
        if example.dim() != 1 or not example.is_contiguous() or example.nbytes > SMALL or node in apart:
            continue
        splits = [user for user in node.users if user.target is _aten.split_with_sizes.default]
        sizes = {tuple(split.args[1]) for split in splits}
        parts = [part for split in splits for part in split.users if _is_vector(part)]
        if len(sizes) == 1 and len({part.args[1] for part in parts}) >= MANY:
            found.append((place, sizes.pop(), parts))
    return found


def _last_writes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Return the copies to inputs with which the graph ends, by input."""
    found: dict[Any, fx.Node] = {}
    for node in itertools.islice(reversed(graph.nodes), 1, None):
        target = node.args[0] if node.target is _aten.copy_.default else None
        if not isinstance(target, fx.Node) or target.op != "placeholder" or node.users or target in found:
            break
        found[target] = node
    return found


def _append_placeholders(graph: fx.Graph, name: str, examples: list[Tensor]) -> list[fx.Node]:
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


def further_inputs(flats: list[FlatInput], inputs: list[Tensor]) -> list[Tensor]:
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


PASS = Pass(
    name="part_inputs",
    why="kernels of equal blocks are equal, and compiled once, if a part of a flat tensor has an address of its own",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and not target.is_open,
    run=part_inputs,
)
