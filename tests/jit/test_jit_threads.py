"""Threads that share a compiled step, each with a state of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from funcamp import jit
from tests.support.helpers import together

THREADS, CALLS = 3, 20
State = dict[str, Tensor]


def count(state: State, batch: Tensor) -> tuple[State, Tensor]:
    state = {"n": state["n"] + 1, "sum": state["sum"] + batch.sum()}
    return state, state["n"].clone()


def begun() -> State:
    return {"n": torch.zeros(()), "sum": torch.zeros(())}


@pytest.mark.parametrize("traced", ["by all at once", "before", "again by all"])
def test_each_thread_keeps_its_state(traced: str) -> None:
    run = jit(count, backend="eager")
    if traced != "by all at once":
        run(begun(), torch.ones(4))
    states: dict[int, State] = {}

    def work(index: int) -> None:
        state = own = begun()
        for call in range(CALLS):
            size = 3 if traced == "again by all" and call >= CALLS // 2 else 4
            state, n = run(state, torch.full((size,), 10.0**index))
            assert n.item() == call + 1
        assert state is own
        states[index] = state

    together(work, THREADS)
    for index, state in states.items():
        elements = 4 * CALLS if traced != "again by all" else 4 * (CALLS // 2) + 3 * (CALLS // 2)
        assert [state["n"].item(), state["sum"].item()] == [CALLS, elements * 10.0**index]
    assert len({id(state) for state in states.values()}) == THREADS


def test_a_thread_that_fails_leaves_the_step_to_the_others() -> None:
    run = jit(count, backend="eager")

    def work(index: int) -> None:
        if index == 0:
            with pytest.raises(TypeError, match="jit: state"):
                run({"n": 1, "sum": 2}, torch.ones(4))
        else:
            _, n = run(begun(), torch.ones(4))
            assert n.item() == 1

    together(work, THREADS)
