"""A step writes nothing but its state: a write into its batch or a tensor that it reads is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
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


def same() -> tuple[Tensor, Tensor]:
    memory = torch.arange(4.0)
    return memory, memory


def views() -> tuple[Tensor, Tensor]:
    memory = torch.arange(8.0)
    return memory[:4], memory[3:7]


def crossed() -> tuple[Tensor, Tensor]:
    memory = torch.arange(16.0).view(4, 4)
    return memory[1], memory[:, 2]


def numpy_slices() -> tuple[Tensor, Tensor]:
    array = numpy.arange(8, dtype=numpy.float32)
    return torch.from_numpy(array[:4]), torch.from_numpy(array[2:6])


def other_dtype() -> tuple[Tensor, Tensor]:
    memory = torch.arange(4.0)
    return memory, memory.view(torch.int32)


PAIRS = [same, views, crossed, numpy_slices, other_dtype]


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_of_a_batch_that_are_only_read_may_share_memory(
    pair: Callable[[], Any], compiled: Callable[..., Any]
) -> None:
    state, _ = compiled(lambda state, batch: ({"w": state["w"] + batch[0] + batch[1]}, None))(
        {"w": torch.zeros(4)}, batch := pair()
    )
    assert_same(state["w"], batch[0] + batch[1])


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a method": lambda x: x.add_(1),
    "a row": lambda x: x[0].mul_(3),
    "a detached tensor": lambda x: x.detach().zero_(),
    "an assignment": lambda x: x.__setitem__(x == 1, 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_the_batch_is_refused(name: str, compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        WRITES[name](batch)
        return {"w": state["w"] + batch}, None

    batch = torch.arange(6.0).view(2, 3)
    with pytest.raises(RuntimeError, match=r"jit: step must not write into its batch.*torch.float32.*\(2, 3\).*clone"):
        compiled(step)({"w": torch.zeros(2, 3)}, batch)
    assert_same(batch, torch.arange(6.0).view(2, 3))


def test_a_clone_of_the_batch_may_be_written(compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels.masked_fill_(labels == 1, 0)
        return {"w": state["w"] + labels}, None

    ids = torch.tensor([0.0, 1.0, 2.0, 1.0])
    state, _ = compiled(step)({"w": torch.zeros(4)}, {"labels": ids, "ids": ids})
    assert_same(state["w"], torch.tensor([0.0, 0.0, 2.0, 0.0]))


COUNTS = torch.zeros(4)


def test_a_write_into_a_tensor_that_the_step_reads_is_refused_by_name(compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        COUNTS.add_(batch)
        return {"w": state["w"] + COUNTS}, None

    with pytest.raises(RuntimeError, match=r"jit: step must write into nothing but its state.*step\.COUNTS"):
        compiled(step)({"w": torch.zeros(4)}, torch.ones(4))
    assert_same(COUNTS, torch.zeros(4))


def test_a_batch_norm_outside_of_the_state_must_be_in_eval_mode(compiled: Callable[..., Any]) -> None:
    norm = torch.nn.BatchNorm1d(3)
    run = compiled(lambda state, batch: ({"w": state["w"] + 1}, norm(batch).detach()))
    state, batch = {"w": torch.zeros(())}, torch.rand(4, 3)
    with pytest.raises(RuntimeError, match=r"step\.norm\.num_batches_tracked.*must be in eval mode"):
        run(state, batch)
    assert norm.num_batches_tracked == 0
    norm.eval()
    _, out = run(state, batch)
    torch.testing.assert_close(out, norm(batch))


def test_the_state_may_be_written_in_place(compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        state["w"].add_(batch)
        return {"w": state["w"] * 2}, state["w"] * 1

    run, state = compiled(step), {"w": torch.zeros(4)}
    for expected in (1.0, 3.0):
        state, written = run(state, torch.ones(4))
        assert_same(written, torch.full((4,), expected))
