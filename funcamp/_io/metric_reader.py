"""Copy metrics to the host without stalling the device: a few steps late, in order, none lost."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._amp.skips_in_a_row import SkipsInARow
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

    Metrics of a step (`Metrics`, or its `to_dict()`) that 20 steps in a row were skipped give one warning.

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
        self._skips = SkipsInARow("MetricReader", depth=3)

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
        metrics = _tree.unflatten(values, oldest.spec)
        self._note_skips(metrics)
        self._arrived.append(metrics)

    def _note_skips(self, metrics: Tree) -> None:
        """Warn if these are a step's metrics, and of one skipped step too many."""
        count = _entry(metrics, "consecutive_skips")
        if isinstance(count, int):
            self._skips.warn(count, lambda: _describe_skip(metrics))


def _entry(metrics: Tree, name: str) -> object:
    """Return an entry of a step's metrics, or of the dict of them; None if there is none."""
    return metrics.get(name) if isinstance(metrics, dict) else getattr(metrics, name, None)


def _describe_skip(metrics: Tree) -> str:
    """Return what is known of the gradients of a skipped step."""
    for name, flags in _observed(metrics).items():
        is_flags = isinstance(flags, Tensor) and flags.dim() == 1
        bad = [index for index, flag in enumerate(flags.tolist()) if flag] if is_flags else []
        if bad:
            return f"observed[{name!r}] flags leaf {bad[0]} first, which is funcamp.leaf_names(params)[{bad[0]}]"
    return (
        f"the loss is {_entry(metrics, 'loss')}, and a gradient is inf or NaN; "
        'make_train_step(observe={"bad": funcamp.found_inf_by_leaf}) finds which'
    )


def _observed(metrics: Tree) -> dict[str, Any]:
    """Return what a step observes, of its metrics or of the dict of them."""
    if isinstance(metrics, dict):
        prefix = "observed/"
        return {name.removeprefix(prefix): value for name, value in metrics.items() if str(name).startswith(prefix)}
    observed = _entry(metrics, "observed")
    return observed if isinstance(observed, dict) else {}


def _on_device(leaf: Tensor) -> bool:
    return leaf.is_cuda


def _record_event(device: torch.device) -> torch.cuda.Event:
    """Return a new event behind everything that the current stream of a device has to do so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
