"""`StateMemory`: where compiled steps keep a state between calls."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit import cuda_graph
from funcamp._jit.captured_tensors import CapturedTensors
from funcamp._jit.donation import OwnedState, take_over
from funcamp._jit.metadata import metadata_in
from funcamp._memory import Memory
from funcamp._types import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

#: All that is written by CUDA graphs. A graph knows addresses only, so no step may keep its state in another one's.
_pinned_memories: weakref.WeakSet[StateMemory] = weakref.WeakSet()
_pinning = threading.Lock()


class StateMemory:
    """The memory in which programs read a state and write its successor: donated, or static for CUDA graphs.

    It knows no programs. All steps that share it have states like the first one.

    Args:
        state: the first state.
        donate: whether programs write the next state into this memory.
        capture: whether programs are captured, on a device that can.
        like: the metadata of the state's leaves, if programs were compiled before.

    Raises:
        RuntimeError: the state is on several GPUs and is to be captured.
    """

    def __init__(self, state: Tree, *, donate: bool, capture: bool, like: Tree = None) -> None:
        devices = [leaf.device for leaf in _tree.leaves(state) if isinstance(leaf, Tensor)]
        self.graphs = cuda_graph.graphs_for(devices) if capture else None
        """Captures and replays; None without CUDA graphs."""
        self.captured: weakref.WeakSet[CapturedTensors] = weakref.WeakSet()
        """The tensors that programs read besides their arguments."""
        self.metadata: Tree = like
        """That of the first state's leaves, with the strides that programs are compiled for."""
        self._donate = donate
        self._is_pinned = False
        self.current = self._taken_over(state)
        """The state of the last call, or that was taken for this one."""
        self.metadata = metadata_in(self.current.tree)

    def has(self, state: Tree) -> bool:
        """Return whether a state is that of the last call."""
        return self.current.is_of(state)

    def meets(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with the state."""
        return self.current.memory.meets(tensor)

    def take(self, state: Tree) -> None:
        """Put another state into memory that programs may write; with CUDA graphs, copy it into their static memory.

        Raises:
            ValueError: it is unlike the first state in structure, shape, dtype or device.
        """
        if self.graphs is None:
            self.current = self._taken_over(state)
            return
        with torch.inference_mode(False), torch.no_grad():
            self.current.refill(state, self.metadata)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _taken_over(self, state: Tree) -> OwnedState:
        """Return a state in memory that programs may write, outside of the tensors that they read besides it."""
        # The memory of a graph is written at every call. If the caller's state must not be written, it is copied.
        is_static = self.graphs is not None
        return take_over(
            state,
            self.metadata,
            avoid=Memory(self._tensors_outside()),
            copy=is_static and not self._donate,
            is_written=is_static or self._donate,
        )

    def _tensors_outside(self) -> Iterator[Tensor]:
        """Yield the tensors whose memory this state may not have: captured ones, and what other graphs write."""
        for captured in self.captured:
            yield from captured.outside_state
        with _pinning:
            others = [memory for memory in _pinned_memories if memory is not self]
        for other in others:
            yield from other.current.statics

    def keep(self, leaves: list[Tensor]) -> Tree:
        """Return the next state, of which a program that does not donate has made the leaves."""
        next_state = OwnedState(self.current.filled(leaves), is_written=False)
        if self.graphs is None:  # else it is copied into the static memory when it is passed
            self.current = next_state
        return next_state.tree

    def pin(self) -> None:
        """Keep the state where it is, because a CUDA graph has its addresses."""
        self._is_pinned = True
        with _pinning:
            _pinned_memories.add(self)

    def move_away_from(self, tensors: list[Tensor]) -> None:
        """Copy the state elsewhere if it shares memory with tensors that programs read besides their arguments.

        Raises:
            RuntimeError: it must stay where it is.
        """
        shared = next(filter(self.meets, tensors), None)
        if shared is None:
            return
        if self._is_pinned:
            raise RuntimeError(
                "jit: step must read no tensor besides its arguments that is in the memory of the state, where an "
                f"earlier CUDA graph writes; got {_tree.describe(shared)}: take it from the state that step gets, or "
                "read a clone() of it"
            )
        self.current = take_over(self.current.tree, self.metadata, avoid=Memory(), copy=True)

    def follow(self, captured: CapturedTensors) -> None:
        """Adopt captured tensors that were given other memory; leave the state's memory if it is now theirs.

        Raises:
            RuntimeError: a CUDA graph reads the former memory, or a program the former kind of tensor.
        """
        captured.follow(may_move=self.graphs is None)
        self.move_away_from(captured.outside_state)
