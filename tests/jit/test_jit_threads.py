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


@pytest.mark.parametrize("is_traced", [False, True])
def test_each_thread_keeps_its_state(is_traced: bool) -> None:
    run = jit(count, backend="eager")
    if is_traced:
        run(begun(), torch.ones(4))

    def work(index: int) -> None:
        state = begun()
        for call in range(CALLS):
            state, n = run(state, torch.full((4 if call < CALLS // 2 else 3,), 10.0**index))
            assert n.item() == call + 1
        assert state["sum"].item() == 7 * (CALLS // 2) * 10.0**index

    together(work, THREADS)
