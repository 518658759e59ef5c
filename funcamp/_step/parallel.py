"""Communication in a step: none on one process, which is what this class does; `distributed.DataParallel` overrides it.

share_r = w_r / sum over ranks of w        the weight of a rank's batch (`shares.py`); 1 / ranks without weights
grads   = sum over ranks of d(scale * share_r * loss_r) / d(params)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import sum_partials
from funcamp._step.accumulate import Result
from funcamp._step.shares import Share
from funcamp._step.state import TrainState
from funcamp._storage.params import Params
from funcamp._types import Tree


@dataclass(frozen=True)
class Parallel:
    """The communication of a step on one process: none."""

    size: int = 1
    """The number of ranks."""
    shard: bool = False
    """Whether a rank stores a part of the state."""
    buckets: int = 1
    """The number of parts of flat storage."""

    def check(self, call: str, params: Params) -> None:
        """Raise ValueError if the parameters are not stored as `own_part` returns them."""
        if params.is_sharded():
            raise ValueError(
                f"{call}: state must not be sharded; distributed.gather_state gives the full state; got params "
                f"{params!r}"
            )

    def agree(self, lines: list[str]) -> None:
        """Raise ValueError on all ranks if a rank's step differs from the first rank's; may read the host."""

    def broadcast_first(self, tree: Tree) -> None:
        """Write the first rank's values into tensors that have the same names on all ranks."""

    def own_part(self, params: Params) -> Params:
        """Return the part of the parameters that this rank stores."""
        return params

    def sum_of_weights(self, weight: Tensor) -> Tensor:
        """Return the sum over ranks of the weights of their batches."""
        return weight

    def summed(self, result: Result, share: Share, before: TrainState) -> Result:  # noqa: ARG002
        """Return the sum of the gradients over ranks, and the means of loss and buffers weighted by share.

        before: the state before the step.
        """
        gradients = _tree.map_leaves(sum_partials, *_tree.flatten(result.gradients))
        return result._replace(gradients=gradients)
