"""Run a step's Python until it has nothing more to change: a program does not run it.

If a run changes something, or what it reaches may have changed unseen (an iterator, a generator of random numbers), a
second one must record the same operations. So a count, an iterator or a cache that grows is found, wherever it is. A
table that is made in the first run needs a third one, which must be as the second. All change the same of the state.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from funcamp import _tree
from funcamp._trace.description import changed_state, description_of, live_nodes, written_inputs
from funcamp._trace.host_generators import host_generators, states_of
from funcamp._trace.places import HOOKS, MISSING, PLAIN_VALUES, Identity, Place, Survey
from funcamp._trace.tracing import HostError

if TYPE_CHECKING:
    from funcamp._trace.trace import Graph

_log = logging.getLogger("funcamp")
_MAX_RUNS = 3
_FIX = (
    "keep it in a buffer of the model (register_buffer, and copy_ to change it) or in loss(has_buffers=True), or pass "
    "it in the batch"
)
_DRAW_INSTEAD = "draw from torch's generator, or pass the numbers in the batch, as tensors"


class _Change(NamedTuple):
    """A place in which a run has put another value."""

    place: Place
    before: object
    after: object


#: What was in each place, by its identity.
_Values = dict[Identity, tuple[Place, object]]


class _Run(NamedTuple):
    """A run of a step's Python on tensors without values."""

    graph: Graph
    before: _Values
    after: _Values
    changes: list[_Change]
    """What differs between these two."""
    drawn: list[Any]
    """The generators of Python and numpy from which numbers were drawn meanwhile."""


def trace_until_stable(trace_once: Callable[[], Graph], roots: Mapping[str, object]) -> Graph:
    """Return the graph of a step's run that changed nothing in Python, or on which two runs agree.

    Args:
        trace_once: runs it.
        roots: the objects that its Python reaches, by name.

    Raises:
        HostError: what it computes depends on what its Python keeps; it replaces a tensor that it reads; it writes
            into something else than its state.
    """
    survey = Survey(roots)
    first_values = _values_of(survey)
    runs: list[_Run] = []
    try:
        while len(runs) < _MAX_RUNS:
            former = runs[-1] if runs else None
            run = _run(trace_once, roots, survey, first_values if former is None else former.after)
            _refuse(run, former)
            has_changed_nothing = not run.changes and not run.drawn and not survey.has_hidden_state
            if has_changed_nothing or (former is not None and _is_same(former.graph, run.graph)):
                _log_notes(run.graph, run.changes)
                return run.graph._replace(changed_places={change.place.identity for change in run.changes})
            runs.append(run)
    except BaseException:
        _put_back(roots, first_values)
        raise
    _put_back(roots, first_values)
    raise HostError(
        f"compute the same at every call, as a program does; its Python changes {_described(runs[-1].changes)}: {_FIX}"
    )


def _run(trace_once: Callable[[], Graph], roots: Mapping[str, object], survey: Survey, before: _Values) -> _Run:
    """Run a step once.

    Args:
        trace_once: runs it.
        roots: the objects that its Python reaches, by name.
        survey: of them before the first run.
        before: what is in each place now.
    """
    generators = [*host_generators(), *survey.generators]
    states_before = states_of(generators)
    with _emptied_caches(survey):
        graph = trace_once()
    states = zip(generators, states_before, states_of(generators))
    drawn = [generator for generator, state_before, state in states if state_before != state]
    after = _values_of(Survey(roots))
    return _Run(graph, before, after, _changes(before, after), drawn)


def _refuse(run: _Run, former: _Run | None) -> None:
    """Raise HostError for what a run of a step must not do, given the run before it, if there was one."""
    if former is not None:
        _refuse_draws(former, run)
    _refuse_writes(run.graph, run.before)
    _refuse_replaced(run.graph, run.changes)
    if former is not None:
        _refuse_other_state(former, run)


@contextlib.contextmanager
def _emptied_caches(survey: Survey) -> Iterator[None]:
    """Context manager: the caches of functions that a run has filled are empty afterwards: its tensors have no values.

    A program computes anew what they would keep. What they have before the first call stays.
    """
    misses_before = [cache.cache_info().misses for cache in survey.caches]
    try:
        yield
    finally:
        for cache, misses in zip(survey.caches, misses_before):
            if cache.cache_info().misses > misses:
                cache.cache_clear()


def _values_of(survey: Survey) -> _Values:
    """Return what is in each place."""
    places = survey.places.items()
    return {identity: (place, place.now()) for identity, place in places if place.key is not HOOKS}


def _put_back(roots: Mapping[str, object], first: _Values) -> None:
    """Put back what was in each place, after a run that is an error: it may have left tensors without values."""
    now = _values_of(Survey(roots))
    for identity, (place, _) in reversed(now.items()):  # the last item of a list is the first to go
        if identity not in first:
            with contextlib.suppress(LookupError, AttributeError, TypeError):
                place.put(MISSING)
    for place, value in first.values():
        if place.now() is not value:
            with contextlib.suppress(LookupError, AttributeError, TypeError):
                place.put(value)


def _changes(before: _Values, after: _Values) -> list[_Change]:
    """Return the places in which a run has put another value; an equal number or text is the same one."""
    changes: list[_Change] = []
    for identity, (place, value) in after.items():
        _, former = before.get(identity, (place, MISSING))
        is_of_one_type = type(former) is type(value)
        is_equal = is_of_one_type and isinstance(value, PLAIN_VALUES) and former == value
        has_places = is_of_one_type and isinstance(value, (list, dict))  # what is in them is listed by itself
        if former is not value and not is_equal and not has_places:
            changes.append(_Change(place, former, value))
    for identity, (place, former) in before.items():
        if identity not in after:
            changes.append(_Change(place, former, MISSING))
    return changes


def _refuse_draws(former: _Run, run: _Run) -> None:
    """Raise HostError if two runs in a row drew from a generator of Python or numpy: one may be another thread's.

    Both may draw numbers that lead to the same operations, as of a layer that is rarely left out.
    """
    for generator in run.drawn:
        if generator in former.drawn:
            is_global = isinstance(generator, ModuleType)
            name = generator.__name__ if is_global else f"a {type(generator).__name__}"
            raise HostError(
                f"not draw from {name}, as a program would repeat the numbers at every step: {_DRAW_INSTEAD}; another "
                "thread that draws meanwhile needs a generator of its own"
            )


def _refuse_writes(graph: Graph, values: _Values) -> None:
    """Raise HostError if a graph writes an input that is not the state.

    In eager code such a write shows in every tensor over the same memory; a program assumes that its inputs share none.
    """
    for number in written_inputs(graph):
        role = graph.roles[number]
        if role == "batch":
            raise HostError(
                f"not write into its batch; it writes into {_tree.describe(graph.examples[number])}: clone it"
            )
        if role == "captured":
            tensor = graph.captured[number - len(graph.roles)]
            raise HostError(
                f"write into nothing but its state; it writes into {_path_of(tensor, values)}, "
                f"{_tree.describe(tensor)}: {_FIX}; a module outside of the model, such as a teacher, must be in eval "
                "mode if it has running statistics"
            )


def _refuse_replaced(graph: Graph, changes: Collection[_Change]) -> None:
    """Raise HostError if a run has replaced a tensor that it reads."""
    read_ids = _ids_of_read(graph) if changes else []
    for change in changes:
        if id(change.before) in read_ids:
            raise HostError(
                f"not replace a tensor that it reads, as a program does not; {change.place.path} is another one after "
                f"the call: {_FIX}"
            )


def _refuse_other_state(former: _Run, run: _Run) -> None:
    """Raise HostError if a run changes other parts of the state than the one before: the later one is the program.

    A table may be made in the first run only. A buffer that is filled from the first batch would stay as it was.
    """
    if changed_state(former.graph) != changed_state(run.graph):
        raise HostError(
            f"change the same parts of its state at every call; its Python changes {_described(former.changes)}, and "
            "then it changes others: fill a buffer before init(), or write it at every call, with torch.where"
        )


def _path_of(tensor: Tensor, values: _Values) -> str:
    return next((place.path for place, value in values.values() if value is tensor), "an attribute or a variable")


def _ids_of_read(graph: Graph) -> list[int]:
    """Return the ids of the captured tensors on which a result or a written input depends, in their order."""
    live = live_nodes(graph)
    inputs = graph.module.graph.find_nodes(op="placeholder")[len(graph.roles) - len(graph.captured) :]
    return [id(tensor) for tensor, node in zip(graph.captured, inputs) if node in live]


def _is_same(one: Graph, other: Graph) -> bool:
    """Return whether two graphs compute the same, from the same captured tensors."""
    return _ids_of_read(one) == _ids_of_read(other) and description_of(one) == description_of(other)


def _described(changes: Collection[_Change]) -> str:
    """Return the first changes as a text."""
    texts = [
        f"{place.path} (from {_tree.brief(before)} to {_tree.brief(after)})" for place, before, after in [*changes][:3]
    ]
    return ", ".join(texts) or "what no attribute shows, such as an iterator, a file or a generator of random numbers"


def _log_notes(graph: Graph, changes: Iterable[_Change]) -> None:
    """Log what is that of the first call in later ones, and what else there is to say of a trace."""
    left: list[_Change] = []
    for change in changes:
        is_table = isinstance(change.after, Tensor) and not change.after.is_meta
        if change.after is not MISSING and not is_table:
            left.append(change)
    notes = sorted(graph.notes)
    if left:
        notes.append(
            "what the step leaves in Python has no values after it (tensors are on meta, others are those of the first "
            f"call): return in the metrics what you read outside of the step; {_described(left)}"
        )
    for note in notes:
        _log.warning("jit: %s", note)
