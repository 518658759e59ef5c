"""The models of DistributedDataParallel: which of their gradients a backward pass sums over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from funcamp._audit.events import Key
from funcamp._audit.tracked import Tracked


class Replicas:
    """The DDP models of a run.

    Their reducer sums in the next backward pass if a forward pass has prepared it: not in `no_sync`, and not if the
    module within is called.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._prepared: list[frozenset[Key]] = []
        """The parameters of each model whose gradients will be summed."""

    def add(self, model: Any) -> None:
        """Remember a DDP model."""
        self._models.add(model)

    def prepare(self, reducer: Any) -> None:
        """Note that a reducer is ready to sum."""
        self._prepared += [self._parameters_of(model) for model in self._models if model.reducer is reducer]

    def end_pass(self, reached: Collection[Key]) -> None:
        """Note that a backward pass has reached parameters: their reducers have summed."""
        self._prepared = [parameters for parameters in self._prepared if parameters.isdisjoint(reached)]

    def synced(self) -> frozenset[Key]:
        """Return the parameters whose gradients the next backward pass sums."""
        return frozenset[Key]().union(*self._prepared)

    def parameters(self) -> frozenset[Key]:
        """Return the parameters of all models."""
        return frozenset[Key]().union(*map(self._parameters_of, self._models))

    def _parameters_of(self, model: Any) -> frozenset[Key]:
        """Return the parameters whose gradients a model's reducer sums."""
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        return frozenset(self._tracked.parameters(value for name, value in named if name not in ignored))
