"""Tapes: zeros that are differentiated together with the parameters, and whose gradients are records.

    d loss / d tape = a record        not a derivative: an operation inside the loss returns a record in its place

So a backward pass returns what was seen in it, through checkpoints, transforms and compilers. There are two kinds
today: the counts of taps (`numerics.tap`) and the largest magnitudes of operands in float8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree

#: How two records of one tape become one.
Merge = Literal["sum", "max"]

_MERGE_FUNCTIONS: dict[Merge, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum}


class Tape(NamedTuple):
    """The zeros of a step, and how their records merge."""

    zeros: Tree
    """A pytree of tensors; `()` for a tape without records."""
    over_micro_batches: Merge = "sum"
    """autograd sums the gradients of several uses of a tape: an operation that needs the maximum passes it on itself.
    Here the records of several backward passes merge."""
    over_ranks: Literal["max"] | None = None
    """None if each rank keeps its own records."""


class Taps(Protocol):
    """The taps of a loss, which it takes as an argument; `numerics` has them."""

    names: tuple[str, ...]

    def tape(self, device: torch.device) -> Tape:
        """Return empty records by name, which add up."""
        ...

    def collected(self, records: Tree) -> Mapping[str, object]:
        """Return the records in the form in which metrics have them."""
        ...


def merged(tapes: Sequence[Tape], before: Sequence[Tree], after: Sequence[Tree]) -> tuple[Tree, ...]:
    """Merge the records of micro-batches with those of the next one, tape by tape."""
    merged_records: list[Tree] = []
    for tape, old_records, new_records in zip(tapes, before, after):
        merge = _MERGE_FUNCTIONS[tape.over_micro_batches]
        old_leaves = _tree.leaves(old_records)
        new_leaves, spec = _tree.flatten(new_records)
        leaves = [merge(old_leaf, new_leaf) for old_leaf, new_leaf in zip(old_leaves, new_leaves)]
        merged_records.append(_tree.unflatten(leaves, spec))
    return tuple(merged_records)


def zeros_of(tapes: Sequence[Tape]) -> tuple[Tree, ...]:
    """Return the tensors of tapes, with respect to which a loss is differentiated."""
    return tuple([tape.zeros for tape in tapes])
