"""`release` frees programs, graphs and memory; the state and the step remain usable."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funcamp import clone, jit
from funcamp._jit import cuda_graph
from tests.support.helpers import assert_same
from tests.support.stand_in import StandIn

State = dict[str, Tensor]


class Graph:
    """In place of a graph: calls what was recorded."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class Watched(StandIn):
    """Has weak references to the graphs that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[weakref.ref[Graph]] = []
        self.alive_at_wait: list[int] = []

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        replay, outputs = super().capture(run)
        graph = Graph(replay)
        self.graphs.append(weakref.ref(graph))
        return lambda: graph.replay(), outputs

    def wait(self) -> None:
        self.alive_at_wait.append(self.alive)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.graphs)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """Those of all captures so far."""
    made: list[Watched] = []

    def graphs_for(devices: list[torch.device]) -> Watched:
        made.append(Watched())
        return made[-1]

    monkeypatch.setattr(cuda_graph, "graphs_for", graphs_for)
    return made


def add(state: State, batch: Tensor) -> tuple[State, Tensor]:
    return {"sum": state["sum"] + batch.sum()}, batch.mean()


def read(state: State, batch: Tensor) -> tuple[State, Tensor]:
    return state, state["sum"] + batch.sum()


def test_graphs_and_memory_are_freed(interfaces: list[Watched]) -> None:
    run = jit(add, backend="aot_eager")
    state: Any = {"sum": torch.zeros(())}
    for size in (2, 3):
        state, metric = run(state, torch.ones(size))
    (graphs,) = interfaces
    pool, memory = weakref.ref(graphs), StorageWeakRef(state["sum"].untyped_storage())
    assert graphs.alive == 2
    run.release()
    assert graphs.alive == 0
    assert graphs.alive_at_wait == [2], "replays end before their graphs do"
    assert run.programs == 0
    assert (state["sum"], metric) == (5, 1)
    interfaces.clear()
    del graphs, state
    assert pool() is None
    assert memory.expired()


def test_all_steps_on_the_state_are_freed(interfaces: list[Watched]) -> None:
    run = jit(add, backend="aot_eager")
    other = run.also(read)
    state, _ = run({"sum": torch.zeros(())}, torch.ones(2))
    other(state, torch.ones(2))
    assert interfaces[0].alive == 2
    other.release()
    assert (interfaces[0].alive, run.programs, other.programs) == (0, 0, 0)
    state, _ = run(state, torch.ones(2))
    assert other(state, torch.ones(2))[1] == 6
    assert [graphs.captures for graphs in interfaces] == [2, 2]


@pytest.mark.parametrize("donate", [True, False])
def test_without_graphs_programs_are_dropped(donate: bool) -> None:
    table = torch.ones(())
    run = jit(lambda state, batch: ({"sum": state["sum"] + batch.sum() * table}, None), backend="eager", donate=donate)
    run.release()  # nothing yet
    state, _ = run({"sum": torch.zeros(())}, torch.ones(2))
    run.release()
    assert run.programs == 0
    table.resize_(1)  # no program reads it any more
    before = clone(state)
    with pytest.raises(ValueError, match="new state must have"):
        run(state, torch.ones(2))
    table.resize_(())
    state, _ = run(state, torch.ones(2))
    assert_same(state["sum"], before["sum"] + 2)
