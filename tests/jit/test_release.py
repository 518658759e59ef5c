"""`release` frees programs, graphs and memory; the state and the step remain usable."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funcamp import jit
from tests.support.stand_in import StandIn


class Watched(StandIn):
    """Has weak references to the graphs that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[weakref.ref[Any]] = []
        self.alive_at_wait: list[int] = []

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        replay, outputs = super().capture(run)
        self.graphs.append(weakref.ref(replay))
        return replay, outputs

    def wait(self) -> None:
        self.alive_at_wait.append(self.alive)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.graphs)


def test_graphs_and_memory_of_all_steps_on_the_state_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Watched()
    graphs.take_place(monkeypatch)
    run = jit(lambda state, batch: ({"sum": state["sum"] + batch.sum()}, batch.mean()), backend="aot_eager")
    other = run.also(lambda state, batch: (state, state["sum"] + batch.sum()))
    state: Any = {"sum": torch.zeros(())}
    for size in (2, 3):
        state, metric = run(state, torch.ones(size))
    other(state, torch.ones(2))
    memory = StorageWeakRef(state["sum"].untyped_storage())
    assert graphs.alive == 3
    other.release()
    assert (graphs.alive, run.programs, other.programs) == (0, 0, 0)
    assert graphs.alive_at_wait == [3], "replays end before their graphs do"
    assert (state["sum"], metric) == (5, 1)
    state = {"sum": state["sum"].clone()}
    assert memory.expired()
    state, _ = run(state, torch.ones(2))
    assert other(state, torch.ones(2))[1] == 9
    assert graphs.captures == 5


@pytest.mark.parametrize("donate", [True, False])
def test_without_graphs_programs_are_dropped(donate: bool) -> None:
    table = torch.ones(())
    run = jit(lambda state, batch: ({"sum": state["sum"] + batch * table.sum()}, None), backend="eager", donate=donate)
    run.release()  # nothing yet
    state, _ = run({"sum": torch.zeros(())}, torch.tensor(2.0))
    run.release()
    assert run.programs == 0
    table.resize_(1).fill_(3.0)  # no program reads it any more
    state, _ = run(state, torch.tensor(2.0))
    assert state["sum"] == 8
