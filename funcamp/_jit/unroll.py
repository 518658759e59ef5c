"""Several steps in one call, on a batch whose tensors are stacked along a first dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit.passes.program import Flat
from funcamp._types import Tree


def check_steps(batch: Tree, unroll: int) -> None:
    """Raise ValueError if the first dimension of a tensor is not unroll."""
    for index, leaf in enumerate(_tree.leaves(batch)):
        if isinstance(leaf, Tensor) and (not leaf.dim() or leaf.shape[0] != unroll):
            raise ValueError(
                f"jit: batch{_tree.path_of(batch, index)} must hold {unroll} steps along its first dimension (unroll); "
                f"got {_tree.describe(leaf)}"
            )


def unrolled(one: Flat, state: int, metrics: int, unroll: int) -> Flat:
    """Return a function that calls a compiled step `unroll` times, each on the previous call's state.

    Args:
        one: the compiled function of state and batch; returns the new state, unless donated, and the metrics.
        state: the number of its first arguments that are the state.
        metrics: the number of its last results that are metrics.
        unroll: the number of calls.
    """

    def run(values: list[Tensor]) -> list[Tensor]:
        held, batches, rows, out = values[:state], values[state:], [], []
        for index in range(unroll):
            out = one([*held, *[leaf[index] for leaf in batches]])
            held = out[: len(out) - metrics] or held
            rows.append(out[len(out) - metrics :])
        return [*out[: len(out) - metrics], *(torch.stack(column) for column in zip(*rows))]

    return run
