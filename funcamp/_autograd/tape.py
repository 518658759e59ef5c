"""A tape: zeros that are differentiated together with the parameters, and whose gradients are records.

    d loss / d tape = a record        not a derivative: an operation inside the loss returns a record in its place

So a backward pass returns what was seen in it, through checkpoints, transforms and compilers: the counts of taps
(`numerics.tap`). autograd sums the records of several uses; those of micro-batches are summed too, and each rank keeps
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from funcamp._types import Tree


class Taps(Protocol):
    """The taps of a loss, which it takes as an argument; `numerics` has them."""

    names: tuple[str, ...]

    def tape(self, device: torch.device) -> Tree:
        """Return empty records by name."""
        ...

    def collected(self, records: Tree) -> Mapping[str, object]:
        """Return the records in the form in which metrics have them."""
        ...
