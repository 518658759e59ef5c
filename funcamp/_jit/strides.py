"""The strides in which programs read tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._dtensor import is_distributed
from funcamp._memory import Memory


class BatchStrides(NamedTuple):
    """The strides in which a program reads the tensors of a batch."""

    strides: list[tuple[int, ...]]
    extents: list[int]
    """The numbers of bytes from the first to the last."""

    def are_outside(self, batch: list[Tensor], memory: Memory) -> bool:
        """Return whether tensors with these strides are outside a memory."""
        return memory.are_free(map(Tensor.data_ptr, batch), self.extents)

    def as_read(self, batch: list[Tensor], memory: Memory) -> list[Tensor]:
        """Return a batch as the program reads it: in these strides, outside memory that it writes, without grad."""
        inputs: list[Tensor] = []
        for leaf, stride, extent in zip(batch, self.strides, self.extents):
            is_outside = memory.is_free(leaf.data_ptr(), extent)
            if leaf.stride() == stride and is_outside and not is_more_than_memory(leaf):
                inputs.append(leaf)
            else:
                inputs.append(copy_with_strides(leaf.detach(), stride))
        return inputs


def strides_for(batch: list[Tensor]) -> BatchStrides:
    """Return the strides to compile for."""
    return BatchStrides([*map(dense_strides, batch)], [leaf.nbytes for leaf in batch])


def dense_strides(leaf: Tensor) -> tuple[int, ...]:
    """Return the strides for which programs are compiled: a tensor's, made dense, in the order of its dimensions.

    Operations pass the order on, and sums follow it: in another order a sum rounds differently from eager code.
    """
    like = torch.empty_strided(leaf.shape, leaf.stride(), device="meta")
    return torch.empty_like(like).stride()


def copy_with_strides(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a copy with these strides; a contiguous one of a DTensor."""
    if is_distributed(leaf):
        return leaf.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def is_more_than_memory(leaf: Tensor) -> bool:
    """Return whether a tensor is more than its numbers in memory: it requires a gradient, or is negated when read."""
    return leaf.requires_grad or leaf.is_neg() or leaf.is_conj()
