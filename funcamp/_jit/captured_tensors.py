"""The tensors that a step reads besides its arguments, as its programs were compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from funcamp._jit.metadata import TensorMetadata, metadata_of

_dtype: Any = Tensor.dtype
_read_dtype: Callable[[Tensor], object] = _dtype.__get__


class CapturedTensors:
    """The captured tensors of all programs of a step, with their addresses and metadata.

    A program has their shapes, strides and dtypes in its code, but reads their addresses at every call.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.outside_state: list[Tensor] = []
        """Those whose memory no state may have."""
        self._metadata: list[TensorMetadata] = []
        self._noted = self._found()

    def add(self, tensors: Iterable[Tensor], outside_state: Iterable[Tensor]) -> None:
        """Add those that are not among them.

        Args:
            tensors: the captured tensors of a program.
            outside_state: those of them whose memory no state may have.
        """
        self.outside_state += outside_state
        known = set(map(id, self.tensors))
        for tensor in tensors:
            if id(tensor) not in known:
                known.add(id(tensor))
                self.tensors.append(tensor)
                self._metadata.append(metadata_of(tensor))
        self._noted = self._found()

    def are_as_before(self) -> bool:
        """Return whether they are what they were at the last call."""
        return self._found() == self._noted

    def follow(self, *, may_move: bool) -> None:
        """Adopt those that were given other memory.

        Args:
            may_move: whether programs read their addresses at every call; a CUDA graph does not.

        Raises:
            RuntimeError: one differs in more than its address, or in that if it may not move.
        """
        for tensor, before, address in zip(self.tensors, self._metadata, self._noted[0]):
            now = metadata_of(tensor)
            has_moved = tensor.data_ptr() != address
            if now != before or (has_moved and not may_move):
                place = "" if may_move else ", in the same memory, where a CUDA graph reads"
                raise RuntimeError(
                    "jit: step must find the tensors that it reads besides its arguments as they were when it was "
                    f"compiled{place}; got {now} with strides {now.stride} for {before} with strides {before.stride} "
                    "(changed by module.to, .data, set_ or t_): write into it with copy_, make it a leaf of the state "
                    "or of the batch, or make another jit"
                )
        self._noted = self._found()

    def _found(self) -> tuple[list[object], ...]:
        """Return what every call compares, read in C.

        Strides and the number of elements instead of the shape: reading a shape takes five times as long.
        """
        tensors = self.tensors
        return (
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.stride, tensors)],
            [*map(Tensor.numel, tensors)],
            [*map(_read_dtype, tensors)],
        )
