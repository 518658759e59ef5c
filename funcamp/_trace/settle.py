"""Trace a step until its Python is as a program leaves it: a trace runs it once, and a program never.

What the step's Python keeps from call to call is no part of a program. So a step whose Python has changed something is
traced once more. If that computes the same, nothing depends on the change. A table that is made at the first call needs
a third run, which computes what the second did. Anything else is an error that names the place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from funcamp import _tree
from funcamp._trace.description import description_of, live_nodes
from funcamp._trace.places import MISSING, Place, places_of
from funcamp._trace.tracing import HostError

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
_MAX_RUNS = 3
_ATOMS = {int, float, bool, str, bytes, type(None)}
_FIX = "register a buffer of the model for it, take loss(has_buffers=True), or pass it in the batch"


class _Found(NamedTuple):
    """A place, and what was there."""

    place: Place
    value: object


_Snapshot = dict[tuple[int, Hashable], _Found]


def settled(trace_once: Callable[[], Graph], roots: Mapping[str, object]) -> tuple[Graph, set[tuple[int, Hashable]]]:
    """Return the graph on which two runs of a step agree, and the identities of the places that its Python changes.

    Raises:
        HostError: what the step computes depends on what its Python has kept.
    """
    first = before = _snapshot(roots)
    own: set[tuple[int, Hashable]] = set()
    former_graph: Graph | None = None
    try:
        for _ in range(_MAX_RUNS):
            graph = trace_once()
            after = _snapshot(roots)
            changes = _changes(before, after)
            own = set(changes)  # those of the last run: what only the first one set is no count
            read_ids = _ids_of_read(graph)
            for change in changes.values():
                if id(change.former) in read_ids:
                    raise HostError(f"not replace a tensor that it reads, as a program does not; {change.path} is another after the call: {_FIX}")
            if former_graph is not None:
                if any(id(tensor) in read_ids for tensor in former_graph.kept_tensors):
                    raise HostError(f"not keep a tensor in Python from call to call; {_named(former_graph.kept_tensors, read_ids, before)}: {_FIX}")
                if _is_same(former_graph, graph):
                    _log_left(changes.values(), graph.kept_tensors)
                    return graph, own
            former_graph = graph
            before = after
        raise HostError(f"compute the same at every call, as a program does; its Python changes {_described(changes.values())}: {_FIX}")
    except BaseException:
        for found in first.values():
            if found.place.now() is not found.value:
                with contextlib.suppress(IndexError, AttributeError, TypeError):
                    found.place.put(found.value)
        raise


class _Change(NamedTuple):
    """A place with another value than before a run."""

    path: str
    former: object
    current: object


def _changes(before: _Snapshot, after: _Snapshot) -> dict[tuple[int, Hashable], _Change]:
    """Return the places with other values; one that holds an equal number has the same."""
    changes: dict[tuple[int, Hashable], _Change] = {}
    for identity, found in after.items():
        former = before[identity].value if identity in before else MISSING
        if former is found.value or (type(former) in _ATOMS and type(found.value) in _ATOMS and former == found.value):
            continue
        if former is not MISSING or isinstance(found.value, (Tensor, int, float)):
            changes[identity] = _Change(found.place.path, former, found.value)
    return changes


def _is_same(one: Graph, other: Graph) -> bool:
    """Return whether two graphs compute the same, from the same captured tensors."""
    captured = [list(map(id, graph.captured)) for graph in (one, other)]
    return captured[0] == captured[1] and description_of(one) == description_of(other)


def _described(changes: Iterable[_Change]) -> str:
    """Return the first changes as a text."""
    texts = []
    for change in list(changes)[:3]:
        values = ["nothing" if value is MISSING else _tree.brief(value) for value in (change.former, change.current)]
        texts.append(f"{change.path} (from {values[0]} to {values[1]})")
    return ", ".join(texts) or "what it reads, such as an iterator, a file or a generator of random numbers"


def _snapshot(roots: Mapping[str, object]) -> _Snapshot:
    return {identity: _Found(place, place.now()) for identity, place in places_of(roots).items()}


def _ids_of_read(graph: Graph) -> set[int]:
    """Return the ids of the captured tensors on which a result or a written input depends."""
    live = live_nodes(graph)
    inputs = graph.module.graph.find_nodes(op="placeholder")[len(graph.inputs) - len(graph.captured) :]
    return {id(tensor) for tensor, node in zip(graph.captured, inputs) if node in live}


def _named(kept_tensors: list[Tensor], read_ids: set[int], before: _Snapshot) -> str:
    """Return a tensor that was kept and read, with its place."""
    tensor = next(tensor for tensor in kept_tensors if id(tensor) in read_ids)
    paths = [found.place.path for found in before.values() if found.value is tensor]
    return f"{paths[0] if paths else 'a variable or a cache'} is {_tree.describe(tensor)} after the first call"


def _log_left(changes: Iterable[_Change], kept_tensors: list[Tensor]) -> None:
    """Log what later calls will not change."""
    numbers = [change for change in changes if not isinstance(change.current, Tensor)]
    if numbers or kept_tensors:
        _log.warning(
            "jit: Python keeps values of the step that later calls will not change: %s",
            ", ".join([_described(numbers)] * bool(numbers) + list(map(_tree.describe, kept_tensors))[:4]),
        )
