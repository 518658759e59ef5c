"""Copy metrics to the host without stalling the device: a few steps late, in order, none lost."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import integer
from funcamp._types import Tree


class _InFlight(NamedTuple):
    """Metrics that are being copied to the host."""

    copies: list[object]
    """The leaves: tensors on the host, whose values arrive later, and what is no tensor."""
    spec: _tree.TreeSpec
    arrivals: list[torch.cuda.Event]
    """An event for every device, after its copies."""


class MetricReader:
    """A queue of metrics that are being copied to the host.

    `put` starts the copies into pinned memory and returns. `ready` returns what has arrived. `drain` waits for the
    rest. On a CPU everything arrives at once.

    Args:
        limit: maximum number in flight; a further `put` waits for the oldest, so that none is lost.

    Raises:
        TypeError: limit is not an integer.
        ValueError: limit is below 1.

    Example:
        >>> reader = MetricReader()
        >>> reader.put({"loss": torch.tensor(0.5)})
        >>> reader.ready()
        [{'loss': 0.5}]
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = integer("MetricReader", "limit", limit, 1)
        self._pending: deque[_InFlight] = deque()
        self._arrived: list[Tree] = []

    def __len__(self) -> int:
        return len(self._pending) + len(self._arrived)

    def put(self, metrics: Tree) -> None:
        """Queue a pytree of metrics. No sync, unless `limit` are in flight."""
        if len(self._pending) >= self._limit:
            self._take(wait=True)
        leaves, spec = _tree.flatten(metrics)
        copies: list[object] = []
        devices: set[torch.device] = set()
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                copies.append(leaf)
                continue
            copies.append(leaf.detach().to("cpu", non_blocking=True, copy=True))
            if _on_device(leaf):
                devices.add(leaf.device)
        self._pending.append(_InFlight(copies, spec, [_record_event(device) for device in devices]))

    def ready(self) -> list[Tree]:
        """Return what arrived since the last call, oldest first, scalars as Python numbers. No sync."""
        while self._pending and all(event.query() for event in self._pending[0].arrivals):  # type: ignore[no-untyped-call]
            self._take(wait=False)
        arrived = self._arrived
        self._arrived = []
        return arrived

    def drain(self) -> list[Tree]:
        """Wait for everything in flight and return it as `ready` does."""
        while self._pending:
            self._take(wait=True)
        return self.ready()

    def _take(self, *, wait: bool) -> None:
        """Move the oldest metrics to those that arrived, with scalars as numbers."""
        oldest = self._pending.popleft()
        if wait:
            for event in oldest.arrivals:
                event.synchronize()
        values = [leaf.item() if isinstance(leaf, Tensor) and not leaf.dim() else leaf for leaf in oldest.copies]
        self._arrived.append(_tree.unflatten(values, oldest.spec))


def _on_device(leaf: Tensor) -> bool:
    return leaf.is_cuda


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Return a new event behind everything that the current stream of a device has to do so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
