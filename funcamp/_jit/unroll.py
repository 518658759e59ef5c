"""Several steps in one call, on a batch whose tensors are stacked along a first dimension."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit.passes.program import Steps, TensorFunction
from funcamp._trace.interface import Outputs
from funcamp._types import Tree


def check_steps(batch: Tree, unroll: int) -> None:
    """Raise ValueError if the first dimension of a tensor is not unroll."""
    for index, leaf in enumerate(_tree.leaves(batch)):
        if isinstance(leaf, Tensor) and (not leaf.dim() or leaf.shape[0] != unroll):
            raise ValueError(
                f"jit: batch{_tree.path_of(batch, index)} must hold {unroll} steps along its first dimension (unroll); "
                f"got {_tree.describe(leaf)}"
            )


def unrolled(one_step: TensorFunction, steps: Steps, outputs: Outputs) -> TensorFunction:
    """Return a function that calls a compiled step for each of several, on the previous call's state.

    Args:
        one_step: the compiled function of state and batch.
        steps: the steps.
        outputs: what its results are; those of the returned function are the same, with stacked metrics.
    """

    def run(values: list[Tensor]) -> list[Tensor]:
        state = values[: steps.state_leaves]
        stacked_batch = values[steps.state_leaves :]
        batches: Iterable[tuple[Tensor, ...]] = [()] * steps.number
        if stacked_batch:
            # All views at once: one by one they take a tenth of a small step's time.
            batches = zip(*(stack.unbind() for stack in stacked_batch))
        metrics_of_steps: list[list[Tensor]] = []
        next_state: list[Tensor] = []
        for batch in batches:
            results = one_step([*state, *batch])
            next_state = outputs.state_of(results)
            state = next_state or state  # a donated step has written into the state
            metrics_of_steps.append(outputs.metric_tensors_of(results))
        return [*next_state, *map(torch.stack, zip(*metrics_of_steps))]

    return run
