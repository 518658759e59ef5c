"""Gradient accumulation: the mean over micro-batches with one scale, weighted if they differ.

A micro-batch and a rank count equally, or by a weight such as the number of tokens:

    share_i = w_i / sum of w over the window's micro-batches and over ranks

A share multiplies the loss instead of the gradient, so that each example's gradient is what one process with all
examples in one batch would compute, also if it underflows or overflows.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._scaler.skip_step import old_where
from funcamp._types import Tree

#: The factor of a loss: a number, or a tensor of shape ().
Share: TypeAlias = "float | Tensor"
#: How much a micro-batch counts.
Weight: TypeAlias = "Callable[[Any], float | Tensor]"


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
Differentiate = Callable[[dict[str, Tensor], Tree, "Tensor | None"], Result]


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
    differentiate: Differentiate,
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
        differentiate: returns the `Result` of one micro-batch.
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
        result = differentiate(buffers, micro_batch, share)
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


# How much each micro-batch counts.


class Shares(NamedTuple):
    """The factors of the losses in one step of this process."""

    own: Share
    """Of the mean over its micro-batches, in the sum over ranks."""
    micro_batch_count: int
    """The number of micro-batches."""
    each: Tensor | None = None
    """Of every micro-batch, float64, shape (micro_batch_count,); None if they count equally."""

    def weigh(self, loss: Tensor, share: Tensor | None) -> Tensor:
        """Multiply the loss of a micro-batch with this share by its factor."""
        if share is None:
            return weighed(loss, self.own, self.micro_batch_count)
        return weighed(loss, share)

    def mean(self, losses: Tensor) -> Tensor:
        """Return the mean of the losses of the micro-batches, shape (micro_batch_count,)."""
        if self.each is None:
            return losses.mean()
        return (weighed(losses, self.each).sum() / self.own).to(losses.dtype)


def shares_of(
    weight: Weight | None,
    pieces: list[Tree],
    ranks: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Shares:
    """Return the factors of micro-batches; NaN if a tensor of weight is negative, or if all weights are 0.

    ranks: the number of ranks.
    sum_over_ranks: returns the sum of a number over ranks.
    """
    if weight is None:
        return Shares(1.0 / ranks, len(pieces))
    weights = torch.stack([_as_tensor(weight(piece), device) for piece in pieces])
    own_weight = weights.sum()
    weight_of_all_ranks = sum_over_ranks(own_weight)
    return Shares(own_weight / weight_of_all_ranks, len(pieces), weights / weight_of_all_ranks)


def _as_tensor(weight: object, device: torch.device) -> Tensor:
    """Return what a weight function returned as a float64 tensor, NaN for a negative one.

    Raises:
        TypeError: it is neither a number nor a tensor.
        ValueError: it is a tensor of another shape than (), or a number that is negative or not finite.
    """
    if isinstance(weight, Tensor):
        if weight.dim():
            raise ValueError(f"step: weight must return a tensor of shape (); got {_tree.describe(weight)}")
        weight = weight.to(device, torch.float64)
        # Reading the value would synchronize; NaN skips the step.
        return torch.where(weight < 0, math.nan, weight)
    if not isinstance(weight, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"step: weight must return a number or a tensor of shape (); got {_tree.brief(weight)}")
    if not 0 <= float(weight) < math.inf:
        raise ValueError(f"step: weight must return 0 or a positive number; got {weight!r}")
    return torch.full((), float(weight), dtype=torch.float64, device=device)


def weighed(value: Tensor, share: Share, count: int = 1) -> Tensor:
    """Multiply a value by a share; 0 if the share is 0, even for NaN (a mean of no examples).

    count: the number of micro-batches among which the share is divided.
    """
    if count != 1:
        value = value / count
    if not isinstance(share, Tensor):
        return value if share == 1.0 else value * share
    share = share.to(torch.promote_types(value.dtype, torch.float32))
    return torch.where(share == 0, torch.zeros_like(value), value * share)
