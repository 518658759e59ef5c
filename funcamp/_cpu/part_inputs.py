"""Pass the parts of small flat tensors to a program as separate inputs.

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
SMALL = 2**20
#: The number of parts from which on a model has equal blocks.
MANY = 16

_aten = torch.ops.aten
_STRIDED = (_aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_copy.default)


class FlatInput(NamedTuple):
    """A flat tensor whose parts are inputs."""

    input_number: int
    """Its number among the inputs."""
    sizes: tuple[int, ...]
    """Those of all its parts."""
    part_numbers: list[int]
    """Which of the parts are inputs."""
    is_written: bool
    """Whether its new value is a result."""


class _Candidate(NamedTuple):
    """A flat tensor whose parts are to become inputs."""

    input_number: int
    sizes: tuple[int, ...]
    """Those of all its parts."""
    part_nodes: list[fx.Node]
    """The nodes that take a vector out of it; several may take the same one."""


def part_inputs(program: Program) -> Program:
    """Return a program in which the parts of small flat inputs are inputs, after all others.

    The new values of such flat inputs are its last results, until the function around it has written them back.
    """
    graph = program.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    last_writes = _last_writes(graph)
    candidates = _candidates(graph, program.examples, last_writes)
    if not candidates:
        return program
    output = graph.output_node()
    former_results: Any = output.args[0]
    results = list(former_results)
    examples = list(program.examples)
    flats: list[FlatInput] = []
    for candidate in candidates:
        flat_node = placeholders[candidate.input_number]
        part_numbers = {_part_number(node) for node in candidate.part_nodes}
        flat = FlatInput(
            candidate.input_number,
            candidate.sizes,
            sorted(part_numbers),
            is_written=flat_node in last_writes,
        )
        example = examples[flat.input_number]
        with program.mode:
            part_examples = [
                torch.empty(flat.sizes[number], dtype=example.dtype, device=example.device)
                for number in flat.part_numbers
            ]
        part_input_nodes = _append_placeholders(graph, f"part_of_{flat_node.name}", part_examples)
        examples += part_examples
        input_of_part = dict(zip(flat.part_numbers, part_input_nodes))
        for node in candidate.part_nodes:
            node.replace_all_uses_with(input_of_part[_part_number(node)])
            graph.erase_node(node)
        if flat.is_written:
            write = last_writes[flat_node]
            results.append(write.args[1])
            graph.erase_node(write)
        flats.append(flat)
    output.args = (results,)

    def with_parts(inner: Flat) -> Flat:
        def run(inputs: list[Tensor]) -> list[Tensor]:
            all_results = list(inner([*inputs, *further_inputs(flats, inputs)]))
            return write_back(flats, inputs, all_results)

        return run

    return program._replace(examples=examples, around=(*program.around, with_parts))


def _part_number(node: fx.Node) -> int:
    """Return which part of a split a node takes."""
    number: Any = node.args[1]
    return int(number)


def _candidates(graph: fx.Graph, examples: list[Tensor], last_writes: dict[fx.Node, fx.Node]) -> list[_Candidate]:
    """Return the small flat inputs that have many vectors as parts."""
    unfit_inputs = _unfit_inputs(graph, last_writes)
    candidates: list[_Candidate] = []
    for input_number, (node, example) in enumerate(zip(graph.find_nodes(op="placeholder"), examples)):
        is_small_vector = example.dim() == 1 and example.is_contiguous() and example.nbytes <= SMALL
        if not is_small_vector or node in unfit_inputs:
            continue
        splits = [user for user in node.users if user.target is _aten.split_with_sizes.default]
        part_nodes = [part for split in splits for part in split.users if _is_vector(part)]
        all_sizes = {tuple(split.args[1]) for split in splits}
        part_numbers = set(map(_part_number, part_nodes))
        if len(all_sizes) == 1 and len(part_numbers) >= MANY:
            candidates.append(_Candidate(input_number, all_sizes.pop(), part_nodes))
    return candidates


def _unfit_inputs(graph: fx.Graph, last_writes: dict[fx.Node, fx.Node]) -> set[object]:
    """Return the inputs whose parts must stay parts."""
    # Inductor may write a value that is another input after that input.
    unfit = {chain_start(write.args[1]) for write in last_writes.values()}
    writes = set(last_writes.values())
    for node in graph.nodes:
        # Offsets of as_strided count from the flat tensor.
        if node.target in _STRIDED:
            unfit.add(chain_start(node, is_view))
        # Only the new value at the end is a result; any other write would be missing in the parts.
        if node not in writes:
            written_values = aliased(node.target, node.args, node.kwargs, written=True)
            unfit |= {chain_start(value, is_view) for value in written_values}
    return unfit


def _last_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the copies to inputs with which the graph ends, by input."""
    writes: dict[fx.Node, fx.Node] = {}
    for node in itertools.islice(reversed(graph.nodes), 1, None):  # all but the output
        target = node.args[0] if node.target is _aten.copy_.default else None
        if not isinstance(target, fx.Node) or target.op != "placeholder" or node.users or target in writes:
            break
        writes[target] = node
    return writes


def _append_placeholders(graph: fx.Graph, name: str, examples: list[Tensor]) -> list[fx.Node]:
    """Give a graph further inputs, after the others, and return them."""
    last = graph.find_nodes(op="placeholder")[-1]
    appended: list[fx.Node] = []
    for number, example in enumerate(examples):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{name}_{number}")
        last.meta = {"val": example}
        appended.append(last)
    return appended


def _is_vector(part: fx.Node) -> bool:
    """Return whether generated kernels may read a part; matrices are read by a library, which gets their address."""
    shapes: list[Any] = [user.args[1] for user in part.users if user.target is _aten.view.default]
    return all(len(shape) < 2 for shape in shapes)


def further_inputs(flats: list[FlatInput], inputs: list[Tensor]) -> list[Tensor]:
    """Return the further inputs of a program that has these."""
    further: list[Tensor] = []
    for flat in flats:
        parts = inputs[flat.input_number].split_with_sizes(flat.sizes)
        further += [parts[number] for number in flat.part_numbers]
    return further


def write_back(flats: list[FlatInput], inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """Give the flat tensors their new values, the last results of the program; return the others."""
    written_tensors = [inputs[flat.input_number] for flat in flats if flat.is_written]
    other_count = len(results) - len(written_tensors)
    for tensor, value in zip(written_tensors, results[other_count:]):
        tensor.copy_(value)
    return results[:other_count]


PASS = Pass(
    name="part_inputs",
    why="kernels of equal blocks are equal, and compiled once, if a part of a flat tensor has a separate address",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and not target.is_open,
    run=part_inputs,
)
