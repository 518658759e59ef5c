"""How much each micro-batch and each rank counts.

They count equally, or by a weight such as the number of tokens:

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
from funcamp._types import Tree

#: The factor of a loss: a number, or a tensor of shape ().
Share: TypeAlias = "float | Tensor"
#: How much a micro-batch counts.
Weight: TypeAlias = "Callable[[Any], float | Tensor]"


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
