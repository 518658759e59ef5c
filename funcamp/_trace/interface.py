"""What the inputs and the results of a traced step are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree

#: What an input of a program is: a leaf of the state, a tensor of the batch, or one that the step reads besides these.
Role: TypeAlias = Literal["state", "batch", "captured"]


class Outputs(NamedTuple):
    """What the results of a program are: leaves of the next state, then the tensors of the metrics."""

    next_state_count: int
    """The number of leaves of the next state; 0 if the program writes them into the memory of the state."""
    build_metrics: Callable[[Iterator[Tensor]], Tree]
    """Takes the metrics' tensors from an iterator, and returns the metrics."""
    metrics_like: Tree
    """The metrics, with the class `Tensor` in the place of each tensor."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the results are without the function, which is made again."""
        return outputs_of, (self.next_state_count, self.metrics_like)

    def state_of(self, results: list[Tensor]) -> list[Tensor]:
        """Return the leaves of the next state."""
        return results[: self.next_state_count]

    def metric_tensors_of(self, results: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the metrics."""
        return results[self.next_state_count :]

    def metrics_of(self, results: list[Tensor]) -> Tree:
        """Return the metrics."""
        return self.build_metrics(iter(self.metric_tensors_of(results)))


def outputs_of(next_state_count: int, metrics: Tree) -> Outputs:
    """Return what the results of a program are, given the number of leaves and the metrics, or what they are like."""
    leaves, spec = _tree.flatten(metrics)
    metrics_like = _tree.unflatten([Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return Outputs(next_state_count, _tree.builder(metrics_like), metrics_like)
