"""Several steps in one call: of a batch whose tensors are stacked along a first dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit.compile import Flat
from funcamp._types import Tree


def first_of(batch: Tree, unroll: int) -> Tree:
    """The first step's batch.

    Raises:
        ValueError: a tensor does not hold that many steps.
    """
    leaves, spec = _tree.flatten(batch)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (not leaf.dim() or leaf.shape[0] != unroll):
            raise ValueError(
                f"jit: batch{_tree.path_of(batch, index)} must hold {unroll} steps along its first dimension (unroll); "
                f"got {_tree.describe(leaf)}"
            )
    return _tree.unflatten([leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def unrolled(one: Flat, state: int, metrics: int, unroll: int) -> Flat:
    """`unroll` calls of a compiled step of one batch, each on the state that the one before left.

    Args:
        one: the compiled function of state and batch; gives the new state, unless donated, and the metrics.
        state: how many of its arguments are the state, the first ones.
        metrics: how many of its results are metrics, the last ones.
        unroll: how often it is called.
    """

    def run(values: list[Tensor]) -> list[Tensor]:
        held, batches, rows, out = values[:state], values[state:], [], []
        for index in range(unroll):
            out = one([*held, *[leaf[index] for leaf in batches]])
            held = out[: len(out) - metrics] or held
            rows.append(out[len(out) - metrics :])
        return [*out[: len(out) - metrics], *(torch.stack(column) for column in zip(*rows))]

    return run
