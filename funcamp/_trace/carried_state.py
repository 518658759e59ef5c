"""State that a step's Python keeps from call to call, in attributes, containers and closures, under `jit`.

A trace runs the Python once. What it replaced there would keep the value of the first call in every later one. A tensor
that it replaced by one like it is state as in torch's loop: the program writes the new value into the memory of the
former one. A number that counts, and a tensor that has no former one to be written into, are errors that name it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.aliases import Aliases
from funcamp._trace.kept_tensors import log_kept
from funcamp._trace.python_state import NUMBERS, Form, Slot, survey
from funcamp._trace.tracing import HostError

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
_MISSING = object()
#: What a place raises that is not there any more.
_GONE = (KeyError, IndexError, AttributeError, ValueError)
_FIX = (
    "keep it in a buffer of the model, in a tensor of the same shape that is there before the first call, or in "
    "loss(has_buffers=True), or pass it in the batch"
)


@dataclass
class _Changes:
    """What one run of the step's Python changed, by path."""

    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What is not a tensor: numbers, lengths and keys of containers, functions, objects; before and after."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that were replaced by one like them: the former one, in which the program writes."""
    made: list[Tensor] = field(default_factory=list)
    """Other tensors that the run made: caches, and what was kept of the batch."""


class CarriedState:
    """The state in the objects that a step's Python reaches; kept with its programs.

    Args:
        roots: the objects, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._before: dict[str, Slot] = {}
        self._forms: dict[str, Form] = {}
        self._changes = _Changes()
        self._kept: list[Tensor] = []
        """Tensors that an earlier run made of what changes from call to call: they are no state."""
        self._private: list[Tensor] = []
        """Former tensors that no object of the user other than their slot has."""
        self._watched: dict[str, Slot] = {}
        self._read: list[Slot] = []
        """Places of other tensors that programs read."""
        self._readers: list[Callable[[], Any]] = []
        self._values: list[Any] = []

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
                graph = self._again(graph, trace_once)
            if self._changes.values or graph.kept:
                self._refuse_state(graph, trace_once)
        except BaseException:
            _restore(self._before)
            _restore(original)
            raise
        finally:
            self._kept = []
        for path in self._changes.carried:
            slot = self._settable(path)
            self._watched[slot.path] = slot
        if graph.kept:
            log_kept(
                "follow from its arguments, and later calls will not change them (return in the metrics what you want "
                "to see)",
                [_tree.describe(value) for value in graph.kept],
            )
        self._note(graph.captured)
        self._before, self._forms = {}, {}
        return graph

    def replaced(self) -> str | None:
        """Return the path of a tensor that a program reads and that was replaced since; None if there is none."""
        if not self._readers:
            return None
        try:  # every call does this
            if all(map(operator.is_, [read() for read in self._readers], self._values)):
                return None
        except _GONE:
            pass
        return next((slot.path for slot in self._read if _now(slot) is not slot.value), None)

    def forget(self) -> None:
        """Forget where the tensors are that programs read, because there are no programs any more."""
        self._read, self._readers, self._values = [], [], []

    def _note(self, captured: list[Tensor]) -> None:
        """Note where the tensors are that a program reads, except those that it writes as its state."""
        ids = set(map(id, captured)) - set(map(id, self._private))
        found = {slot.path: slot for slot in self._read}
        for path, slot in self._before.items():
            if id(slot.value) in ids:
                place = self._settable(path)
                found[place.path] = place
        # What the step's own Python replaced, a cache of another size, is as in torch's loop.
        self._read = [slot for slot in found.values() if slot.owner is not None and _now(slot) is slot.value]
        self._readers = [slot.reader() for slot in self._read]
        self._values = [slot.value for slot in self._read]

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

    def record(self, node_of: Callable[[Tensor], fx.Node | None]) -> None:
        """Compare Python with what it was before this run, and write what it carries on; called inside the trace."""
        changes = self._changes = _Changes()
        written: list[tuple[Tensor, Tensor]] = []
        known = {id(slot.value) for slot in self._before.values()}
        kept = set(map(id, self._kept))
        now = survey(self._roots)
        for path, slot in now.items():
            before: Any = self._before[path].value if path in self._before else _MISSING
            if isinstance(slot.value, Tensor):
                if slot.value is before:
                    continue
                node = node_of(slot.value)
                is_state = isinstance(before, Tensor) and _is_plain(before) and _is_like(before, slot.value)
                if is_state and id(before) not in kept:
                    if node is None and not _is_plain(slot.value):
                        raise HostError(f"not replace {path} in a scan: write into it in the loss, or pass scan=False")
                    changes.carried[path] = before
                    written.append((before, slot.value))
                elif node is not None:
                    changes.made.append(slot.value)
            elif before is not _MISSING:
                if found := self._forms[path].changed(path, Form(slot.value, known)):
                    changes.values[found[0]] = found[1:]
            elif isinstance(slot.value, NUMBERS):
                changes.values[path] = before, slot.value
        for path, slot in self._before.items():
            if path not in now and isinstance(slot.value, NUMBERS):
                changes.values[path] = slot.value, _MISSING
        with torch.no_grad():
            values = [value.detach().clone() for _, value in written]  # all of them before the first write
            for (place, _), value in zip(written, values):
                place.copy_(value)
        for path in changes.carried:
            self._put_back(path)

    def _begin(self) -> None:
        self._before = survey(self._roots)
        self._forms = {path: Form(slot.value) for path, slot in self._before.items()}
        self._changes = _Changes()

    def _again(self, graph: Graph, trace_once: Callable[[], Graph]) -> Graph:
        """Trace once more, after a trace that may have kept tensors.

        Raises:
            HostError: this run reads a tensor that one before it made of what changes from call to call. A program of
                the first run makes it at every call, and one of this run has it as it was at the first.
        """
        self._kept += graph.kept
        self._begin()
        paths = {id(slot.value): path for path, slot in reversed(self._before.items())}
        names = {id(value): paths.get(id(value), "a variable or a function's cache") for value in self._kept}
        graph = trace_once()
        live = _live(graph)
        inputs = graph.module.graph.find_nodes(op="placeholder")[-len(graph.captured) :]
        read = {id(leaf) for leaf, node in zip(graph.captured, inputs) if node in live}
        for value in self._kept:
            if id(value) in read:
                raise HostError(
                    "not keep a tensor in Python from call to call that the first call makes of the batch or of a part "
                    f"of the state that it changes; {names[id(value)]} is {_tree.describe(value)} after the first "
                    f"call: {_FIX}"
                )
        return graph

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
            HostError: a value changed in both runs, or in the first one, and with it what is computed; or a tensor
                that the first run made of what changes is read.
        """
        first = self._changes
        made = set(map(id, first.made)) - set(map(id, graph.kept))
        try:
            again = self._again(graph, trace_once)
        except HostError:
            raise
        except Exception as error:  # of an iterator that has ended, or an assertion
            if first.values:
                raise HostError(_changed(*next(iter(first.values.items())))) from error
            raise
        is_same = _is_same(graph, again)
        only_values = not is_same and not made  # otherwise a cache may be why the second run computes something else
        repeated = {name: ends for name, ends in first.values.items() if name in self._changes.values}
        if repeated and made and not is_same:
            is_same = _is_same(again, self._again(again, trace_once))
        for name, ends in first.values.items():
            if (name in repeated and not is_same) or only_values:
                raise HostError(_changed(name, ends))
        if repeated:  # a count for a log, or of what is done every so often
            counting = [f"{name} ({_from_to(ends)})" for name, ends in repeated.items()]
            _log.warning(
                "jit: Python counts in the step, and later calls will not: %s; what is done at a certain count will "
                "not be done",
                ", ".join(counting[:4]) + ", ..." * (len(counting) > 4),
            )


def _is_same(one: Graph, other: Graph) -> bool:
    """Return whether two graphs return and write the same values."""
    first, second = map(_live, (one, other))
    return [node.format_node() for node in first] == [node.format_node() for node in second]


def _live(graph: Graph) -> dict[fx.Node, None]:
    """Return the nodes that a result or a written input depends on, in their order."""
    nodes = graph.module.graph
    aliases = Aliases(nodes)
    written = (writers for memory, writers in aliases.writers.items() if memory.op != "call_function")
    live = aliases.behind(nodes.output_node(), *itertools.chain.from_iterable(written))
    return dict.fromkeys(node for node in nodes.nodes if node in live)


def _changed(name: str, ends: tuple[Any, Any]) -> str:
    kind = "a number" if any(isinstance(end, NUMBERS) and end is not None for end in ends) else "an object"
    return (
        f"not keep {kind} in Python from call to call, which a program would not change; {name} changed "
        f"{_from_to(ends)} in the first call: {_FIX}"
    )


def _from_to(ends: tuple[Any, Any]) -> str:
    before, after = ("nothing" if end is _MISSING else _tree.brief(end) for end in ends)
    return f"from {before} to {after}"


def _restore(slots: Mapping[str, Slot]) -> None:
    """Put back what was in each place after a failure."""
    for slot in slots.values():
        if slot.owner is not None and _now(slot) is not slot.value:
            with contextlib.suppress(IndexError, AttributeError, TypeError):  # a list that became shorter
                slot.put(slot.value)


def _now(slot: Slot) -> Any:
    try:
        return slot.now()
    except _GONE:
        return _MISSING


def _is_plain(value: Tensor) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad


def _is_like(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
