"""Pass the parts of small flat tensors to a program as separate inputs.

The biases and norms of all blocks of a model are parts of one flat tensor. Inductor writes the offset of a part into
the code of every kernel that reads it, so the kernels of equal blocks differ, and each is compiled. A part that is an
input has an address instead, and equal kernels are compiled once.

Inductor does not know that such inputs share memory, so they are parts of a copy: a program may read one after it has
written the flat tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Pass, Program, TensorFunction
from funcamp._jit.passes.writes import written_early
from funcamp._trace.aliases import Aliases

_aten = torch.ops.aten

#: The largest flat tensor, in bytes, that is worth another copy in every step.
SMALL = 2**20
#: The number of parts from which on a first call is shorter. Each takes about a microsecond of every call.
MANY = 32

_STRIDED = (_aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_copy.default)


class _Flat(NamedTuple):
    """A flat tensor, parts of a copy of which are inputs."""

    input_number: int
    """Its number among the inputs."""
    sizes: list[int]
    """Those of all its parts."""
    part_numbers: list[int]
    """Which of the parts are inputs."""

    def parts_of_copy(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return these parts of a copy, given the inputs of the program."""
        parts = inputs[self.input_number].clone().split_with_sizes(self.sizes)
        return [parts[number] for number in self.part_numbers]


class _WithParts(NamedTuple):
    """Gives a program the parts after its inputs."""

    flats: list[_Flat]

    def __call__(self, inner: TensorFunction) -> TensorFunction:
        """Return the function of the inputs without the parts."""

        def run(inputs: list[Tensor]) -> list[Tensor]:
            parts = [part for flat in self.flats for part in flat.parts_of_copy(inputs)]
            return inner([*inputs, *parts])

        return run


def part_inputs(program: Program) -> Program:
    """Return a program with parts of copies of small flat inputs as inputs, after all others."""
    graph = program.module.graph
    aliases = Aliases(graph)
    roots_written = written_early(graph, aliases)
    # Offsets of as_strided count from the flat tensor.
    strided = {aliases.root[node] for node in graph.nodes if node.target in _STRIDED}
    flats: list[_Flat] = []
    examples = list(program.examples)
    for input_number, node in enumerate(graph.find_nodes(op="placeholder")):
        splits = [user for user in node.users if user.target is _aten.split_with_sizes.default]
        all_sizes = {tuple(split.args[1]) for split in splits}
        if len(all_sizes) != 1 or not _is_small_vector(examples[input_number]):
            continue
        part_nodes = [part for split in splits for part in split.users if _is_vector(part)]
        part_numbers = sorted({_part_number(part) for part in part_nodes})
        # A part would show an earlier write.
        if node in roots_written or node in strided or len(part_numbers) < MANY:
            continue
        flat = _Flat(input_number, list(all_sizes.pop()), part_numbers)
        with program.mode:
            part_examples = [part.clone() for part in flat.parts_of_copy(examples)]
        inputs = dict(zip(part_numbers, _append_placeholders(graph, f"part_of_{node.name}", part_examples)))
        for part in part_nodes:
            part.replace_all_uses_with(inputs[_part_number(part)])
            graph.erase_node(part)
        examples += part_examples
        flats.append(flat)

    if not flats:
        return program
    return program._replace(examples=examples, around=(*program.around, _WithParts(flats)))


def _part_number(node: fx.Node) -> int:
    """Return which part of a split a node takes."""
    number: Any = node.args[1]
    return int(number)


def _is_small_vector(example: Tensor) -> bool:
    return example.dim() == 1 and example.is_contiguous() and example.nbytes <= SMALL


def _is_vector(part: fx.Node) -> bool:
    """Return whether generated kernels may read a part; matrices are read by a library, which gets their address."""
    shapes: list[Any] = [user.args[1] for user in part.users if user.target is _aten.view.default]
    return all(len(shape) < 2 for shape in shapes)


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


PASS = Pass(
    name="part_inputs",
    why="kernels of equal blocks are equal, and compiled once, if a part of a flat tensor has a separate address",
    evidence="benchmarks/passes.py",
    where=lambda target: target.by_inductor and target.on_cpu and not target.is_open,
    run=part_inputs,
)
