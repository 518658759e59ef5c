"""Inputs that a program writes: a part of the batch, or a tensor that the step reads besides its arguments.

In eager code a write into one tensor shows in every tensor over the same memory. A compiled program assumes that its
inputs share no memory, so it may have read the other tensor before the write. Such inputs are therefore refused. Nearly
all programs write nothing but their state, whose memory `donation` keeps separate, and check nothing.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._memory import Memory, overlaps, overlaps_itself
from funcamp._trace.aliases import Aliases
from funcamp._trace.interface import Input
from funcamp._trace.trace import Graph
from funcamp._types import Tree

_COPY = torch.ops.aten.copy_.default


class _AllInputs(NamedTuple):
    """The inputs of a call of a program, in one list."""

    names: list[str]
    """For errors."""
    tensors: list[Tensor]
    written: set[int]
    """The numbers of those that the program writes."""


class WrittenInputs:
    """The inputs that a program writes.

    Args:
        state: the numbers of the state's leaves among them, except those that only get their new value.
        batch: the numbers of the batch's tensors among them.
        captured: all tensors that the step reads besides its arguments.
        written: the numbers of those among them.
    """

    def __init__(self, state: list[int], batch: list[int], captured: list[Tensor], written: list[int]) -> None:
        self._state = state
        self.batch = batch
        self._captured = captured
        self._written = written
        self.forget()

    @property
    def captured(self) -> list[Tensor]:
        """Return the captured tensors that the program writes."""
        return [self._captured[number] for number in self._written]

    @property
    def writes_state(self) -> bool:
        """Return whether it writes leaves of the state besides giving them their new value."""
        return bool(self._state)

    def forget(self) -> None:
        """Compare the captured tensors with each other at the next call, because one has other memory."""
        #: Of all captured tensors; None until they were compared with each other.
        self._captured_memory: Memory | None = None
        #: Of those that the program writes.
        self._written_memory = Memory()

    def check(self, state: Tree, batch: Tree, state_memory: Memory, *, is_there: bool) -> None:
        """Refuse inputs that share memory with one that is written.

        Args:
            state: the state.
            batch: the batch.
            state_memory: the memory that programs write the state to; no captured tensor is there.
            is_there: whether the state is in that memory, so that no two of its leaves share any.

        Raises:
            ValueError: two inputs share memory, and the program writes one of them; or elements of one share a place.
        """
        batch_tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)]
        outside_leaves = None if is_there else [leaf for leaf in _tree.leaves(state) if leaf is not None]
        if self._captured_memory is None or self._may_share(outside_leaves, batch_tensors, state_memory):
            self._refuse_shared(state, batch)
            self._captured_memory = Memory(self._captured)
            self._written_memory = Memory(self.captured)

    def _may_share(
        self, outside_leaves: list[Tensor] | None, batch_tensors: list[Tensor], state_memory: Memory
    ) -> bool:
        """Return False if no input shares memory with a written one; True if the bytes must be compared.

        Args:
            outside_leaves: the leaves of the state; None if they are in `state_memory`.
            batch_tensors: the batch's tensors.
            state_memory: the memory that programs write the state to.
        """
        assert self._captured_memory is not None
        written_batch_memory = Memory()
        for number in self.batch:
            leaf = batch_tensors[number]
            if state_memory.meets(leaf) or self._captured_memory.meets(leaf) or written_batch_memory.meets(leaf):
                return True
            if not leaf.is_contiguous():  # two of its elements may be in one place
                return True
            written_batch_memory.add(leaf)
        others = [leaf for number, leaf in enumerate(batch_tensors) if number not in self.batch]
        if self._state:
            if outside_leaves is not None or any(map(state_memory.meets, batch_tensors)):
                return True
        elif outside_leaves is not None:
            others += outside_leaves
        return any(written_batch_memory.meets(leaf) or self._written_memory.meets(leaf) for leaf in others)

    def _refuse_shared(self, state: Tree, batch: Tree) -> None:
        """Compare all inputs by their bytes.

        Raises:
            ValueError: one that is written shares memory with another one, or elements of it share a place.
        """
        names, tensors, written = self._all_inputs(state, batch)
        for number in sorted(written):
            if tensors[number].numel() and overlaps_itself(tensors[number]):
                raise ValueError(
                    f"jit: {names[number]} must have a place in memory for every element, because step writes into it; "
                    f"got {_tree.describe(tensors[number])} with strides {tensors[number].stride()}: clone it first"
                )
        for pair in overlaps({str(number): tensor for number, tensor in enumerate(tensors)}):
            # One that is written is named first.
            first, second = sorted(map(int, pair), key=lambda number: number not in written)
            if first in written:
                raise ValueError(
                    f"jit: {names[first]} must share no memory with {names[second]}, because step writes into it; got "
                    f"{_tree.describe(tensors[first])} and {_tree.describe(tensors[second])}: pass or keep a clone() "
                    "of one of them"
                )

    def _all_inputs(self, state: Tree, batch: Tree) -> _AllInputs:
        """Return all inputs in one list: the state's leaves, the batch's tensors, then the captured tensors."""
        names: list[str] = []
        tensors: list[Tensor] = []
        written: set[int] = set()
        for argument, tree, written_numbers in (("state", state, self._state), ("batch", batch, self.batch)):
            written |= {len(tensors) + number for number in written_numbers}
            for index, leaf in enumerate(_tree.leaves(tree)):
                if isinstance(leaf, Tensor):
                    names.append(argument + _tree.path_of(tree, index))
                    tensors.append(leaf)
        written |= {len(tensors) + number for number in self._written}
        names += ["a tensor that step reads besides its arguments"] * len(self._captured)
        tensors += self._captured
        return _AllInputs(names, tensors, written)

    def copy_back(self, batch: list[Tensor], inputs: list[Tensor]) -> None:
        """Copy what the program wrote into copies of the batch's tensors to those tensors, on their device."""
        for number in self.batch:
            leaf = batch[number]
            written_tensor = inputs[number]
            if leaf is not written_tensor and leaf.device == written_tensor.device:
                leaf.detach().copy_(written_tensor)


def written_inputs(graph: Graph) -> WrittenInputs | None:
    """Return the inputs that a traced step writes, besides giving the state its new values; None if it writes none."""
    final_copies = _final_copies(graph)
    writers = Aliases(graph.module.graph).writers
    written: set[Input] = set()
    for node, argument in zip(graph.module.graph.find_nodes(op="placeholder"), graph.inputs):
        if any(writer not in final_copies for writer in writers.get(node, ())):
            written.add(argument)
    if not written:
        return None

    def numbers_of(kind: str) -> list[int]:
        return sorted(argument.number for argument in written if argument.kind == kind)

    return WrittenInputs(numbers_of("state"), numbers_of("batch"), graph.captured, numbers_of("captured"))


def writes_state(graph: Graph, written: WrittenInputs | None) -> bool:
    """Return whether a traced step gives the state new values: as results, or in its memory.

    written: what `written_inputs` returned for it.
    """
    is_written_before = written is not None and written.writes_state
    return bool(graph.outputs.next_state_count) or is_written_before or bool(_final_copies(graph))


def _final_copies(graph: Graph) -> set[fx.Node]:
    """Return the copies to the state with which a donated step ends."""
    copies: set[fx.Node] = set()
    if graph.outputs.next_state_count:
        return copies
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    state_nodes = {node for node, argument in zip(placeholders, graph.inputs) if argument.kind == "state"}
    for node in itertools.islice(reversed(graph.module.graph.nodes), 1, None):  # all but the output
        if node.target is not _COPY or node.args[0] not in state_nodes:
            break
        copies.add(node)
    return copies
