"""Bring metrics to the host without stalling the device: some steps late, in order, none lost."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import integer
from funcamp._types import Tree


class _Arrival(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class MetricReader:
    """A queue of metrics on their way to the host.

    `put` starts the copies into pinned memory and returns; `ready` gives what has arrived, `drain` waits for the rest.
    On a CPU everything has arrived at once.

    Args:
        limit: how many may be under way; one more waits for the oldest, so that none is lost.

    Raises:
        TypeError: limit is no integer.
        ValueError: limit is below 1.

    Example:
        >>> reader = MetricReader()
        >>> reader.put({"loss": torch.tensor(0.5)})
        >>> reader.ready()
        [{'loss': 0.5}]
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = integer("MetricReader", "limit", limit, 1)
        self._pending: deque[tuple[list[Any], Any, _Arrival | None]] = deque()
        self._arrived: list[Any] = []

    def __len__(self) -> int:
        return len(self._pending) + len(self._arrived)

    def put(self, metrics: Tree) -> None:
        """Queue a pytree of metrics. No sync, unless `limit` are under way."""
        if len(self._pending) >= self._limit:
            self._take(wait=True)
        leaves, spec = _tree.flatten(metrics)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor) and _on_device(leaf)), None)
        copies = [
            leaf.detach().to("cpu", non_blocking=True, copy=True) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        self._pending.append((copies, spec, None if device is None else _recorded(device)))

    def ready(self) -> list[Any]:
        """What has arrived since the last call, oldest first: tensors of shape () as Python numbers. No sync."""
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            self._take(wait=False)
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[Any]:
        """As `ready`, after waiting for all that is under way."""
        while self._pending:
            self._take(wait=True)
        return self.ready()

    def _take(self, *, wait: bool) -> None:
        copies, spec, arrival = self._pending.popleft()
        if wait and arrival is not None:
            arrival.synchronize()
        values = [leaf.item() if isinstance(leaf, Tensor) and not leaf.dim() else leaf for leaf in copies]
        self._arrived.append(_tree.unflatten(values, spec))


def _on_device(leaf: Tensor) -> bool:
    return leaf.is_cuda


def _recorded(device: torch.device) -> _Arrival:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
