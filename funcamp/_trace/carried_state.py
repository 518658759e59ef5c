"""State that a step's Python keeps from call to call, in attributes, containers and closures, under `jit`.

A trace runs the Python once, so whatever it assigned there would keep the value of the first call in every later call.
A tensor that was replaced by one of the same kind is state, as in torch's loop: the program writes the new value into
the memory of the former tensor. A number that counts, or a new tensor without a former one to write into, raises an
error that names it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._trace.description import description_of, live_nodes
from funcamp._trace.kept_tensors import join_first, log_kept
from funcamp._trace.python_state import GONE, MISSING, NUMBERS, Form, Slot, survey
from funcamp._trace.tracing import HostError, NodeOf

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
#: The largest number of runs in which tensors are followed that move from place to place.
_MAX_MOVES = 8
_FIX = (
    "keep it in a buffer of the model, in a tensor of the same shape that is there before the first call, or in "
    "loss(has_buffers=True), or pass it in the batch"
)


class _Change(NamedTuple):
    """What was in a place before a run, and what is there after it; `MISSING` for nothing."""

    before: object
    after: object


@dataclass
class _Changes:
    """What one run of the step's Python changed, by path."""

    values: dict[str, _Change] = field(default_factory=dict)
    """What is not a tensor: numbers, lengths and keys of containers, functions, objects."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that were replaced by one of the same kind: the former ones, which the program writes."""
    other_tensors: list[Tensor] = field(default_factory=list)
    """Other tensors that the run made: caches, and what was kept of the batch."""
    other_places: dict[str, _Change] = field(default_factory=dict)
    """Where there is another tensor now that is not carried: one that this run or an earlier one made."""


class CarriedState:
    """The state in the objects that a step's Python reaches; kept with its programs.

    Args:
        roots: the objects, by name.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = roots
        self._before: dict[str, Slot] = {}
        self._forms: dict[str, Form] = {}
        self._changes = _Changes()
        self._earlier_tensors: list[Tensor] = []
        """Tensors that an earlier run made of what changes from call to call: they are no state."""
        self._private_tensors: list[Tensor] = []
        """Former tensors that no object of the user refers to, except their slot."""
        self._state_slots: dict[str, Slot] = {}
        """Places of tensors that programs write."""
        self._read_slots: list[Slot] = []
        """Places of other tensors that programs read."""
        self._readers: list[Callable[[], object]] = []
        """Functions that return what is in those places now."""
        self._read_values: list[object] = []
        """What was there when the step was traced."""

    # For every call

    def find_replaced(self) -> str | None:
        """Return the path of a tensor that a program reads, or of an object around it, that was replaced since."""
        if not self._readers:
            return None
        try:  # every call does this
            if all(map(operator.is_, [read() for read in self._readers], self._read_values)):
                return None
        except GONE:
            pass
        return next((slot.path for slot in self._read_slots if slot.now_or_missing() is not slot.value), None)

    def follow(self) -> None:
        """Adopt tensors that were assigned between calls where a program writes its state: copy their values.

        Raises:
            RuntimeError: something else was assigned.
        """
        for slot in self._state_slots.values():
            assigned = slot.now()
            if assigned is slot.value:
                continue
            state_leaves, state_structure = _tree.flatten(slot.value)
            assigned_leaves, assigned_structure = _tree.flatten(assigned)
            if state_structure != assigned_structure or not all(map(_is_like, state_leaves, assigned_leaves)):
                raise RuntimeError(
                    f"jit: {slot.path} must keep its structure, shape, dtype and device, because a program writes it; "
                    f"got {_tree.brief(assigned)}: write into it (zero_(), copy_()), or make another jit"
                )
            with torch.no_grad():
                for state_leaf, assigned_leaf in zip(state_leaves, assigned_leaves):
                    state_leaf.copy_(assigned_leaf)
            slot.put(slot.value)

    def forget(self) -> None:
        """Forget where the tensors are that programs read, because all programs were dropped."""
        self._read_slots = []
        self._readers = []
        self._read_values = []

    # For a trace

    def trace(self, trace_once: Callable[[], Graph]) -> Graph:
        """Return the graph of a step, which also writes the state; Python is afterwards as a program leaves it.

        Raises:
            HostError: Python keeps a number or a tensor that a program cannot.
        """
        self._survey_before()
        original_slots = self._before
        try:
            graph = trace_once()
            while self._make_private():  # the graph writes the former tensors, and now there are others
                graph = self._trace_again(graph, trace_once)
            if self._changes.values or graph.kept_tensors:
                self._refuse_counts(graph, trace_once)
        except BaseException:
            _restore(self._before)
            _restore(original_slots)  # the former tensors, which private ones may have replaced
            raise
        finally:
            self._earlier_tensors = []
        for path in self._changes.carried:
            self._state_slots |= {slot.path: slot for slot in self._slots_around(path)}
        if graph.kept_tensors:
            log_kept(
                "follow from its arguments, and later calls will not change them (return in the metrics what you want "
                "to see)",
                [_tree.describe(value) for value in graph.kept_tensors],
            )
        self._note_read(graph.captured)
        self._before = {}
        self._forms = {}
        return graph

    def record(self, node_of: NodeOf) -> None:
        """Compare Python with what it was before this run, and write what it carries on; called inside the trace.

        Args:
            node_of: returns the node of a tensor of the trace.
        """
        self._changes = _Changes()
        slots_now = survey(self._roots)
        new_values: list[Tensor] = []
        for path, slot in slots_now.items():
            before = self._value_before(path)
            if not isinstance(slot.value, Tensor) or slot.value is before:
                continue
            if self._is_carried(path, before, slot.value, node_of):
                self._changes.carried[path] = before
                new_values.append(slot.value)
            else:
                self._changes.other_places[path] = _Change(before, slot.value)
        self._refuse_other_kinds(slots_now)
        self._note_changed_values(slots_now)
        with torch.no_grad():
            copies = [value.detach().clone() for value in new_values]  # all of them before the first write
            for former_tensor, copy in zip(self._changes.carried.values(), copies):
                former_tensor.copy_(copy)
        for path in self._changes.carried:
            self._put_back(path)

    def _refuse_other_kinds(self, slots_now: Mapping[str, Slot]) -> None:
        """Raise HostError if a container is put back for a tensor that it carries, and has one that is not carried."""
        put_back: set[str] = set()
        for path in self._changes.carried:
            parents = self._parents_of(path)
            put_back |= {parent for parent in parents if slots_now[parent].value is not self._before[parent].value}
        for path, change in self._changes.other_places.items():
            if path in self._before and put_back.intersection(self._parents_of(path)):
                raise HostError(
                    f"not keep a tensor of another shape or dtype in {path} than was there; it changed "
                    f"{_describe_change(change)} in the first call: begin with a tensor of the kind that it gets"
                )

    def _parents_of(self, path: str) -> list[str]:
        """Return the paths of the objects that a value was in before this run."""
        parents: list[str] = []
        parent = self._before[path].parent
        while parent is not None:
            parents.append(parent)
            parent = self._before[parent].parent
        return parents

    def _value_before(self, path: str) -> Any:
        """Return what was in a place before this run; `MISSING` if there was no such place."""
        return self._before[path].value if path in self._before else MISSING

    def _note_changed_values(self, slots_now: Mapping[str, Slot]) -> None:
        """Note what is not a tensor and is not as it was before this run."""
        known_ids = {id(slot.value) for slot in self._before.values()}
        for path, slot in slots_now.items():
            if isinstance(slot.value, Tensor):
                continue
            before = self._value_before(path)
            if before is not MISSING:
                difference = self._forms[path].difference(path, Form(slot.value, known_ids))
                if difference is not None:
                    name, former, current = difference
                    self._changes.values[name] = _Change(former, current)
            elif isinstance(slot.value, NUMBERS):
                self._changes.values[path] = _Change(MISSING, slot.value)
        for path, slot in self._before.items():
            if path not in slots_now and isinstance(slot.value, NUMBERS):
                self._changes.values[path] = _Change(slot.value, MISSING)

    def _is_carried(self, path: str, before: object, value: Tensor, node_of: NodeOf) -> bool:
        """Return whether a tensor replaced one of the same kind, and so is state; note any other new tensor.

        Raises:
            HostError: a branch of torch.cond replaced it.
        """
        if value is before:
            return False
        node = node_of(value)
        has_former = isinstance(before, Tensor) and _is_plain(before) and _is_like(before, value)
        if has_former and not any(before is tensor for tensor in self._earlier_tensors):
            if node is None and not _is_plain(value):
                raise HostError(f"not replace {path} in a branch of torch.cond: write into it")
            return True
        if node is not None:
            self._changes.other_tensors.append(value)
        return False

    def _survey_before(self) -> None:
        """Note what Python keeps before a run."""
        self._before = survey(self._roots)
        self._forms = {path: Form(slot.value) for path, slot in self._before.items()}
        self._changes = _Changes()

    def _note_read(self, captured: list[Tensor]) -> None:
        """Note where the tensors are that a program reads, except those that it writes as its state."""
        private_ids = set(map(id, self._private_tensors))
        captured_ids = set(map(id, captured)) - private_ids
        slots = {slot.path: slot for slot in self._read_slots}
        for path, slot in self._before.items():
            if id(slot.value) in captured_ids:
                slots |= {around.path: around for around in self._slots_around(path)}
        # What the step's own Python replaced, a cache of another size, is as in torch's loop.
        self._read_slots = [
            slot for slot in slots.values() if slot.owner is not None and slot.now_or_missing() is slot.value
        ]
        self._readers = [slot.reader() for slot in self._read_slots]
        self._read_values = [slot.value for slot in self._read_slots]

    def _trace_again(self, graph: Graph, trace_once: Callable[[], Graph]) -> Graph:
        """Trace once more, after a trace that may have kept tensors.

        Raises:
            HostError: this run reads a tensor that one before it made of what changes from call to call. A program of
                the first run makes it at every call, and one of this run has it as it was at the first.
        """
        self._earlier_tensors += graph.kept_tensors
        self._survey_before()
        # Reversed, so that a tensor in several places has the path of the first.
        paths = {id(slot.value): path for path, slot in reversed(self._before.items())}
        names = [paths.get(id(tensor), "a variable or a function's cache") for tensor in self._earlier_tensors]
        graph = trace_once()
        read_ids = _ids_of_read(graph)
        for name, tensor in zip(names, self._earlier_tensors):
            if id(tensor) in read_ids:
                raise HostError(
                    "not keep a tensor in Python from call to call that the first call makes of the batch or of a part "
                    f"of the state that it changes; {name} is {_tree.describe(tensor)} after the first call: {_FIX}"
                )
        return graph

    def _make_private(self) -> bool:
        """Give each carried tensor separate memory, because other objects may use the former memory.

        Returns:
            Whether there was one without.
        """
        private_ids = set(map(id, self._private_tensors))
        shared = {path: tensor for path, tensor in self._changes.carried.items() if id(tensor) not in private_ids}
        for path, tensor in shared.items():
            private = tensor.detach().clone()
            self._private_tensors.append(private)
            self._put(path, private)
        return bool(shared)

    def _put(self, path: str, value: object) -> None:
        """Put a value in a place; if that is in a tuple, put another tuple in the tuple's place."""
        slot = self._before[path]
        self._before[path] = slot._replace(value=value)
        parent = self._before.get(slot.parent or "")
        if slot.owner is not None or parent is None:
            slot.put(value)
            return
        items = list(parent.value)
        items[slot.key] = value
        kind = type(parent.value)
        is_named_tuple = hasattr(kind, "_fields")
        self._put(parent.path, kind(*items) if is_named_tuple else kind(items))

    def _slots_around(self, path: str) -> Iterator[Slot]:
        """Yield the places in which another value can be put, from that of a value itself outwards."""
        slot: Slot | None = self._before[path]
        while slot is not None:
            if slot.owner is not None:
                yield slot
            slot = self._before.get(slot.parent or "")

    def _put_back(self, path: str) -> None:
        """Put back a former tensor, and the objects that it was in."""
        slot = self._before[path]
        if slot.parent is not None:
            self._put_back(slot.parent)
        if slot.owner is not None and slot.now_or_missing() is not slot.value:
            slot.put(slot.value)

    def _refuse_counts(self, graph: Graph, trace_once: Callable[[], Graph]) -> None:
        """Run the step's Python once more to distinguish values that count from values that are set once.

        Raises:
            HostError: a value changed in both runs, or in the first one, and with it what is computed; or a tensor
                that the first run made of what changes is read.
        """
        first_changes = self._changes
        cached_ids = set(map(id, first_changes.other_tensors)) - set(map(id, graph.kept_tensors))
        try:
            second_graph = self._trace_again(graph, trace_once)
        except HostError:
            raise
        except Exception as error:  # of an iterator that has ended, or an assertion
            if first_changes.values:
                name, change = next(iter(first_changes.values.items()))
                raise HostError(_count_error(name, change)) from error
            raise
        repeated = {name: change for name, change in first_changes.values.items() if name in self._changes.values}
        computes_the_same = _computes_the_same(graph, second_graph)
        # Otherwise a cache may be why the second run computes something else.
        only_values_changed = not computes_the_same and not cached_ids
        if repeated and cached_ids and not computes_the_same:
            third_graph = self._trace_again(second_graph, trace_once)  # it has the caches, as the second one has
            computes_the_same = _computes_the_same(second_graph, third_graph)
        for name, change in first_changes.values.items():
            if only_values_changed or (name in repeated and not computes_the_same):
                raise HostError(_count_error(name, change))
        if repeated:  # a count for a log, or of what is done every so often
            _warn_of_counts(repeated)
        self._follow_moves(second_graph, trace_once, {*first_changes.other_places})

    def _follow_moves(self, graph: Graph, trace_once: Callable[[], Graph], known_places: set[str]) -> None:
        """Trace on while a tensor that an earlier run made moves to another place, where a later run may read it.

        Args:
            graph: of the last run.
            trace_once: runs the step.
            known_places: those that had such a tensor before.

        Raises:
            HostError: a run reads one.
        """
        for _ in range(_MAX_MOVES):
            earlier_ids = set(map(id, self._earlier_tensors))
            moved_to = {path for path, change in self._changes.other_places.items() if id(change.after) in earlier_ids}
            if moved_to <= known_places:
                return
            known_places |= moved_to
            graph = self._trace_again(graph, trace_once)


def _computes_the_same(one: Graph, other: Graph) -> bool:
    """Return whether two graphs return and write the same values."""
    return description_of(one) == description_of(other)


def _ids_of_read(graph: Graph) -> set[int]:
    """Return the ids of the captured tensors on which a result or a written input depends."""
    live = live_nodes(graph)
    inputs = graph.module.graph.find_nodes(op="placeholder")[-len(graph.captured) :]
    return {id(tensor) for tensor, node in zip(graph.captured, inputs) if node in live}


def _count_error(name: str, change: _Change) -> str:
    """Return the text of the error for something in Python that changed and is not a tensor."""
    is_number = any(isinstance(value, NUMBERS) and value is not None for value in change)
    kind = "a number" if is_number else "an object"
    return (
        f"not keep {kind} in Python from call to call, which a program would not change; {name} changed "
        f"{_describe_change(change)} in the first call: {_FIX}"
    )


def _warn_of_counts(changes: Mapping[str, _Change]) -> None:
    """Log that later calls will not change what every run of the step's Python changes."""
    counts = [f"{name} ({_describe_change(change)})" for name, change in changes.items()]
    _log.warning(
        "jit: Python counts in the step, and later calls will not: %s; what is done at a certain count will "
        "not be done",
        join_first(counts),
    )


def _describe_change(change: _Change) -> str:
    before, after = ("nothing" if value is MISSING else _tree.brief(value) for value in change)
    return f"from {before} to {after}"


def _restore(slots: Mapping[str, Slot]) -> None:
    """Put back what was in each place after a failure."""
    for slot in slots.values():
        if slot.owner is not None and slot.now_or_missing() is not slot.value:
            with contextlib.suppress(IndexError, AttributeError, TypeError):  # a list that became shorter
                slot.put(slot.value)


def _is_plain(value: Tensor) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad


def _is_like(one: object, other: object) -> bool:
    """Return whether two values are tensors of the same shape, dtype and device."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
