"""Gradient accumulation: the mean over micro-batches with one scale, weighted if they differ (`shares.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._scaler.skip_step import old_where
from funcamp._step.shares import Shares
from funcamp._types import Tree


class Result(NamedTuple):
    """What differentiating the loss of a batch returns, or of one of its micro-batches."""

    gradients: Tree
    """The gradients of the scaled loss, as the parameters are stored."""
    loss: Tensor
    """The unscaled loss."""
    buffers: dict[str, Tensor]
    """The buffers after the forward pass."""
    records: Tree
    """The records of the tape."""
    aux: Tree
    """The auxiliary outputs; of a batch stacked over its micro-batches."""


#: (the buffers before, a micro-batch, its share or None) -> its `Result`.
ResultOf = Callable[[dict[str, Tensor], Tree, "Tensor | None"], Result]


def micro_batches(batch: Tree, limit: int) -> list[Tree]:
    """Return the micro-batches along the first dimension of a batch.

    Raises:
        ValueError: tensors of batch have no micro-batch, more than limit, or different numbers of them.
    """
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)]
    # Under symbolic tracing sizes cannot be hashed; int() turns them into constants.
    counts = {int(leaf.shape[0]) if leaf.dim() else 0 for leaf in tensors}
    if len(counts) != 1 or not 1 <= min(counts) <= limit:
        raise ValueError(
            f"step: every tensor of batch must hold 1 to {limit} micro-batches along its first dimension, all the same "
            f"number; got {[tuple(leaf.shape) for leaf in tensors]}: stack them, "
            "[torch.stack(parts) for parts in zip(*micro_batches)]"
        )
    return _tree.unstacked(batch, min(counts))


def accumulate(
    result_of: ResultOf,
    params: Tree,
    buffers: dict[str, Tensor],
    tape: Tree,
    micro_batches: list[Tree],
    shares: Shares,
) -> Result:
    """Sum gradients and records over the micro-batches of a batch, and return the mean of their losses.

    A non-finite gradient of one micro-batch makes the sum non-finite, so one check afterwards covers all. Buffers pass
    from one micro-batch to the next; aux is stacked.

    Args:
        result_of: returns the `Result` of one micro-batch.
        params: a tree like the gradients.
        buffers: the buffers before the step.
        tape: the tape of the loss's taps.
        micro_batches: the parts of the batch.
        shares: how much each one counts.
    """
    sums = _tree.map_leaves(torch.zeros_like, *_tree.flatten(params))
    records = _tree.map_leaves(torch.zeros_like, *_tree.flatten(tape))
    losses: list[Tensor] = []
    each_aux: list[Tree] = []
    each_share = [None] * len(micro_batches) if shares.each is None else shares.each
    for micro_batch, share in zip(micro_batches, each_share):
        result = result_of(buffers, micro_batch, share)
        new = (_added(sums, result.gradients), _added(records, result.records), result.buffers)
        if share is not None:
            # A micro-batch with a share of 0 changes nothing: the backward pass of a mean over 0 examples gives NaN.
            new = old_where("step", share == 0, new, (sums, records, buffers))
        sums, records, buffers = new
        losses.append(result.loss)
        each_aux.append(result.aux)
    loss = shares.mean(torch.stack(losses))
    return Result(sums, loss, buffers, records, _tree.stacked(each_aux))


def _added(sums: Tree, addends: Tree) -> Tree:
    """Return the sums with gradients, or records, added in the dtype of the sums; None adds nothing."""
    totals, spec = _tree.flatten(sums)
    for index, addend in enumerate(_tree.leaves(addends)):
        if addend is not None:
            totals[index] = totals[index] + addend.to(totals[index].dtype)
    return _tree.unflatten(totals, spec)
