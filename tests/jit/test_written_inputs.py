"""A step writes nothing but its state: a write into its batch or a tensor that it reads is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from funcamp._jit import cuda_graph
from tests.support.helpers import assert_same
from tests.support.stand_in import StandIn

MODES = ["donated", "captured", "undonated"]


@pytest.fixture(params=MODES)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`jit` by a compiler that generates no code; captured, into a stand-in for a CUDA graph."""
    if request.param == "captured":
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    options = {"backend": "aot_eager", "donate": request.param != "undonated"}
    return lambda step, **more: jit(step, **{**options, **more})


def views() -> tuple[Tensor, Tensor]:
    memory = torch.arange(8.0)
    return memory[:4], memory[3:7]


def other_dtype() -> tuple[Tensor, Tensor]:
    memory = torch.arange(4.0)
    return memory, memory.view(torch.int32)


PAIRS = [views, other_dtype]


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_of_a_batch_that_are_only_read_may_share_memory(
    pair: Callable[[], Any], compiled: Callable[..., Any]
) -> None:
    state, _ = compiled(lambda state, batch: ({"w": state["w"] + batch[0] + batch[1]}, None))(
        {"w": torch.zeros(4)}, batch := pair()
    )
    assert_same(state["w"], batch[0] + batch[1])


def test_the_state_may_be_written_in_place(compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        state["w"].add_(batch)
        return {"w": state["w"] * 2}, state["w"] * 1

    run, state = compiled(step), {"w": torch.zeros(4)}
    for expected in (1.0, 3.0):
        state, written = run(state, torch.ones(4))
        assert_same(written, torch.full((4,), expected))
