"""State that a step's Python keeps from call to call, in attributes, containers and closures, under `jit`.

A trace runs the Python once. What it replaced there would keep the value of the first call in every later one. A tensor
that it replaced by one like it is state as in torch's loop: the program writes the new value into the memory of the
former one. A number that counts, and a tensor that has no former one to be written into, are errors that name it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.aliases import Aliases
from funcamp._trace.python_state import CONTAINERS, NUMBERS, Slot, survey
from funcamp._trace.tracing import HostError

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
_MISSING = object()
_FIX = (
    "keep it in a buffer of the model, in a tensor of the same shape that is there before the first call, or in "
    "loss(has_buffers=True), or pass it in the batch"
)


@dataclass
class _Changes:
    """What one run of the step's Python changed, by path."""

    numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Numbers, strings and lengths of containers: before and after."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that were replaced by one like them: the former one, in which the program writes."""
    of_batch: list[str] = field(default_factory=list)
    """New tensors that follow from the batch."""
    others: list[str] = field(default_factory=list)
    """Other new tensors: caches."""


class CarriedState:
    """The state in the objects that a step's Python reaches; kept with its programs.

    Args:
        roots: the objects, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._before: dict[str, Slot] = {}
        self._lengths: dict[str, int] = {}
        self._changes = _Changes()
        self._only_read: frozenset[str] = frozenset()
        """Paths that a second run must not write, to tell whether it reads them."""
        self._private: list[Tensor] = []
        """Former tensors that no object of the user other than their slot has."""
        self._watched: dict[str, Slot] = {}

    def traced(self, trace_once: Callable[[], Graph]) -> Graph:
        """Return the graph of a step, which also writes the state; Python is afterwards as a program leaves it.

        Raises:
            HostError: Python keeps a number or a tensor that a program cannot.
        """
        self._begin()
        original = self._before
        try:
            graph = trace_once()
            while self._make_private():
                self._begin()
                graph = trace_once()
            if self._changes.numbers or self._changes.of_batch:
                self._refuse_state(graph, trace_once)
        except BaseException:
            _restore(self._before)
            _restore(original)
            raise
        finally:
            self._only_read = frozenset()
        for path in self._changes.carried:
            slot = self._settable(path)
            self._watched[slot.path] = slot
        self._before = {}
        return graph

    def follow(self) -> None:
        """Adopt tensors that were assigned between calls where a program writes its state: copy their values.

        Raises:
            RuntimeError: something else was assigned.
        """
        for slot in self._watched.values():
            current = slot.now()
            if current is slot.value:
                continue
            former, given = _tree.leaves(slot.value), _tree.leaves(current)
            alike = len(former) == len(given) and all(map(_is_like, former, given))
            if not alike:
                raise RuntimeError(
                    f"jit: {slot.path} must keep its structure, shape, dtype and device, because a program writes it; "
                    f"got {_tree.brief(current)}: write into it (zero_(), copy_()), or make another jit"
                )
            with torch.no_grad():
                for place, value in zip(former, given):
                    place.copy_(value)
            slot.put(slot.value)

    def record(self, node_of: Callable[[Tensor], fx.Node | None], state_count: int) -> None:
        """Compare Python with what it was before this run, and write what it carries on; called inside the trace."""
        changes = self._changes = _Changes()
        written: list[tuple[Tensor, Tensor]] = []
        fresh: dict[str, fx.Node] = {}
        for path, slot in survey(self._roots).items():
            before: Any = self._before[path].value if path in self._before else _MISSING
            if isinstance(slot.value, Tensor):
                if slot.value is before:
                    continue
                node = node_of(slot.value)
                is_state = isinstance(before, Tensor) and _is_plain(before) and _is_like(before, slot.value)
                if is_state and path not in self._only_read:
                    if node is None and not _is_plain(slot.value):
                        raise HostError(f"not replace {path} in a scan: write into it in the loss, or pass scan=False")
                    changes.carried[path] = before
                    written.append((before, slot.value))
                elif node is not None:
                    fresh[path] = node
            elif isinstance(slot.value, NUMBERS):
                if not _is_equal(before, slot.value):
                    changes.numbers[path] = (before, slot.value)
            elif isinstance(slot.value, CONTAINERS) and self._lengths.get(path, len(slot.value)) != len(slot.value):
                changes.numbers[f"len({path})"] = (self._lengths[path], len(slot.value))
        if fresh:
            graph = next(iter(fresh.values())).graph
            aliases = Aliases(graph)
            batch = set(graph.find_nodes(op="placeholder")[state_count:])
            for path, node in fresh.items():
                follows = bool(batch & aliases.behind(node))
                (changes.of_batch if follows else changes.others).append(path)
        with torch.no_grad():
            values = [value.detach().clone() for _, value in written]  # all of them before the first write
            for (place, _), value in zip(written, values):
                place.copy_(value)
        for path in changes.carried:
            self._put_back(path)

    def _begin(self) -> None:
        self._before = survey(self._roots)
        self._lengths = {
            path: len(slot.value) for path, slot in self._before.items() if isinstance(slot.value, CONTAINERS)
        }
        self._changes = _Changes()

    def _make_private(self) -> bool:
        """Give each carried tensor memory of its own, because the former one may be in other hands."""
        known = set(map(id, self._private))
        others = {path: place for path, place in self._changes.carried.items() if id(place) not in known}
        for path, place in others.items():
            own = place.detach().clone()
            self._private.append(own)
            self._put(path, own)
        return bool(others)

    def _put(self, path: str, value: Any) -> None:
        slot = self._before[path]
        self._before[path] = slot._replace(value=value)
        parent = self._before.get(slot.parent or "")
        if slot.owner is not None or parent is None:
            slot.put(value)
            return
        items = list(parent.value)
        items[slot.key] = value
        kind = type(parent.value)
        self._put(parent.path, kind(*items) if hasattr(kind, "_fields") else kind(items))

    def _settable(self, path: str) -> Slot:
        slot = self._before[path]
        while slot.owner is None and slot.parent is not None:
            slot = self._before[slot.parent]
        return slot

    def _put_back(self, path: str) -> None:
        """Put back a former tensor, and the objects that it was in."""
        slot = self._before[path]
        if slot.parent is not None:
            self._put_back(slot.parent)
        if slot.owner is not None and _now(slot) is not slot.value:
            slot.put(slot.value)

    def _refuse_state(self, graph: Graph, trace_once: Callable[[], Graph]) -> None:
        """Run the step's Python once more to tell what counts from what is set once.

        Raises:
            HostError: a number changed in both runs, or in the first one, and with it what is computed; or a tensor
                that follows from the batch and was not there before is read.
        """
        first = self._changes
        self._only_read = frozenset(first.of_batch)
        self._begin()
        new_tensors = {path: self._before[path].value for path in first.of_batch if path in self._before}
        again = trace_once()
        is_same = str(graph.module.graph) == str(again.module.graph)
        only_flags = not is_same and not first.others
        counting: list[str] = []
        for path, (before, after) in first.numbers.items():
            if path in self._changes.numbers and is_same:  # a count for a log, or of what is done every so often
                counting.append(f"{path} ({_from(before)} to {after!r})")
            elif path in self._changes.numbers or only_flags:
                raise HostError(
                    f"not keep a number in Python from call to call, which a program would not change; {path} changed "
                    f"{_from(before)} to {after!r} in the first call: {_FIX}"
                )
        if counting:
            _log.warning(
                "jit: Python counts in the step, and later calls will not: %s; what is done at a certain count will "
                "not be done",
                ", ".join(counting[:4]) + ", ..." * (len(counting) > 4),
            )
        for path, value in new_tensors.items():
            if any(leaf is value for leaf in again.captured):
                raise HostError(
                    f"not keep a tensor in Python from call to call if there is none like it before; {path} is "
                    f"{_tree.describe(value)} after the first call: {_FIX}"
                )


def _restore(slots: Mapping[str, Slot]) -> None:
    """Put back numbers and tensors after a failure."""
    for slot in slots.values():
        if slot.owner is not None and isinstance(slot.value, (*NUMBERS, Tensor)) and _now(slot) is not slot.value:
            with contextlib.suppress(IndexError):  # of a list that became shorter
                slot.put(slot.value)


def _from(before: Any) -> str:
    return "from nothing" if before is _MISSING else f"from {_tree.brief(before)}"


def _now(slot: Slot) -> Any:
    try:
        return slot.now()
    except (KeyError, IndexError, AttributeError, ValueError):
        return _MISSING


def _is_equal(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and bool(operator.eq(before, after) or (before != before and after != after))


def _is_plain(value: Tensor) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad


def _is_like(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
