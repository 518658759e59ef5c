"""The models of DistributedDataParallel (DDP): which gradients a backward pass sums over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from funcamp.report.events import Key
from funcamp.report.tracked import Tracked

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """The DDP models of a run.

    A model's reducer sums gradients in the next backward pass only if a forward pass has prepared it. DDP prepares it
    neither in `no_sync` nor if the script calls the wrapped module instead of the DDP model.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._prepared: list[frozenset[Key]] = []
        """For each prepared reducer: the parameters whose gradients it will sum."""

    def add(self, model: DistributedDataParallel) -> None:
        """Remember a DDP model."""
        self._models.add(model)

    def prepare(self, reducer: object) -> None:
        """Note that a reducer is prepared to sum."""
        self._prepared += [self._parameters_of(model) for model in self._models if model.reducer is reducer]

    def end_pass(self, reached: Collection[Key]) -> None:
        """Note that a backward pass has ended: the reducers of the parameters that it reached have summed."""
        self._prepared = [parameters for parameters in self._prepared if parameters.isdisjoint(reached)]

    def synced(self) -> frozenset[Key]:
        """Return the parameters whose gradients the next backward pass sums over ranks."""
        return frozenset[Key]().union(*self._prepared)

    def parameters(self) -> frozenset[Key]:
        """Return the parameters whose gradients DDP is to sum, of all models."""
        return frozenset[Key]().union(*map(self._parameters_of, self._models))

    def _parameters_of(self, model: DistributedDataParallel) -> frozenset[Key]:
        """Return the parameters whose gradients a model's reducer sums."""
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        return frozenset(self._tracked.parameters(value for name, value in named if name not in ignored))
