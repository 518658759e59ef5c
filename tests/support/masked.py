"""A loss that is a mean over some rows of its batch, and how many they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def masked(params: Any, batch: Any) -> Tensor:
    """The mean of x w over the rows that count."""
    x, mask = batch
    loss: Tensor = ((x @ params["w"]) * mask).sum() / mask.sum()
    return loss


def tokens(batch: Any) -> Tensor:
    """How many rows count."""
    count: Tensor = batch[1].sum()
    return count
