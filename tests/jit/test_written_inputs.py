"""A part of the batch, or a tensor that the step reads besides its arguments, that the step writes."""

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

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
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
CLEAN = r"must share no memory with .*, because step writes into it; got a torch.*: pass or keep a clone\(\)"


def write_first(state: Any, batch: Any) -> Any:
    batch[0].add_(1)
    return {"w": state["w"] + batch[1]}, batch[1] * 1


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("later", [False, True])
def test_parts_of_a_batch(pair: Callable[[], Any], later: bool, compiled: Callable[..., Any]) -> None:
    run, state, batch = compiled(write_first), {"w": torch.zeros(4)}, pair()
    if later:
        state, _ = run(state, (torch.zeros(4), batch[1].clone()))
        batch = pair()
    before = [leaf.clone() for leaf in batch]
    with pytest.raises(ValueError, match=rf"jit: batch\[0\] {CLEAN}".replace(".*", r"batch\[1\]", 1)):
        run(state, batch)
    assert_same(list(batch), before)
    separate = batch[0].clone(), batch[1]
    expected = state["w"] + batch[1]
    state, _ = run(state, separate)
    assert_same((state["w"], separate[0]), (expected, before[0] + 1))


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_of_a_batch_that_are_only_read(pair: Callable[[], Any], compiled: Callable[..., Any]) -> None:
    state, _ = compiled(lambda state, batch: ({"w": state["w"] + batch[0] + batch[1]}, None))(
        {"w": torch.zeros(4)}, batch := pair()
    )
    assert_same(state["w"], batch[0] + batch[1])


def test_neighbours_in_one_storage_are_written(compiled: Callable[..., Any]) -> None:
    run, state, memory = compiled(write_first), {"w": torch.zeros(4)}, torch.arange(8.0)
    for _ in range(3):
        expected = state["w"] + memory[4:], memory[:4] + 1, memory[4:].clone()
        state, _ = run(state, (memory[:4], memory[4:]))
        assert_same((state["w"], memory[:4], memory[4:]), expected)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "transposed": lambda: torch.arange(6.0).view(3, 2).t(),
    "with gaps": lambda: torch.arange(12.0).view(2, 6)[:, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[0].mul_(3), lambda x: x.detach().zero_()])
def test_the_batch_is_written_as_in_eager_code(
    name: str, write: Callable[[Tensor], Any], compiled: Callable[..., Any]
) -> None:
    def step(state: Any, batch: Any) -> Any:
        write(batch)
        return {"w": state["w"] + batch}, None

    run, actual, expected = compiled(step), {"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 3)}
    for _ in range(3):
        batches = LAYOUTS[name](), LAYOUTS[name]()
        expected, _ = step(expected, batches[0])
        actual, _ = run(actual, batches[1])
        assert_same((actual, batches[1]), (expected, batches[0]))


def test_a_batch_whose_elements_share_a_place_is_not_written(compiled: Callable[..., Any]) -> None:
    for step, batch in (
        (write_first, (torch.zeros(1).expand(4), torch.zeros(4))),
        (write_first, (torch.zeros(5).unfold(0, 2, 1)[:, 0].as_strided((4,), (0,)), torch.zeros(4))),
    ):
        with pytest.raises(ValueError, match=r"jit: batch\[0\] must have a place in memory for every element"):
            compiled(step)({"w": torch.zeros(4)}, batch)


def test_steps_in_one_call_write_their_rows(compiled: Callable[..., Any]) -> None:
    run, rows = compiled(write_first, unroll=2), torch.zeros(2, 4)
    state, _ = run({"w": torch.zeros(4)}, (rows, torch.ones(2, 4)))
    assert_same((state["w"], rows), (torch.full((4,), 2.0), torch.ones(2, 4)))
    with pytest.raises(ValueError, match=rf"jit: batch\[0\] {CLEAN}"):
        run(state, (rows, rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_are_the_inputs(backend: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        batch["labels"].masked_fill_(batch["labels"] == 1, 0)
        return {"w": state["w"] + batch["ids"].float()}, {}

    run, ids = jit(step, backend=backend), torch.tensor([0, 1, 2, 1])
    with pytest.raises(ValueError, match=r"jit: batch\['labels'\] must share no memory with batch\['ids'\]"):
        run({"w": torch.zeros(4)}, {"ids": ids, "labels": ids})
    state, _ = run({"w": torch.zeros(4)}, {"ids": ids, "labels": ids.clone()})
    assert state["w"].tolist() == [0, 1, 2, 1]


OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda leaf: leaf,
    "view": lambda leaf: leaf.view(2, 2).view(4),
    "numpy": lambda leaf: torch.from_numpy(leaf.numpy()),
    "part": lambda leaf: torch.cat([leaf[:3], leaf[3:]]).set_(leaf.untyped_storage(), 0, (4,), (1,)),
}


@pytest.mark.parametrize("name", OVER)
def test_a_captured_tensor_that_is_written_over_another_one(name: str, compiled: Callable[..., Any]) -> None:
    first = torch.zeros(4)
    other = OVER[name](first) if name != "itself" else first

    def step(state: Any, batch: Tensor) -> Any:
        first.add_(batch)
        return {"w": state["w"] + other}, None

    run = compiled(step)
    if name == "itself":  # one input
        state, _ = run({"w": torch.zeros(4)}, torch.ones(4))
        state, _ = run(state, torch.ones(4))
        assert_same((state["w"], first), (torch.full((4,), 3.0), torch.full((4,), 2.0)))
        return
    with pytest.raises(ValueError, match=f"jit: a tensor that step reads besides its arguments {CLEAN}"):
        run({"w": torch.zeros(4)}, torch.ones(4))
    assert first.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", OVER)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("written", ["batch", "captured"])
def test_a_batch_over_a_captured_tensor(name: str, later: bool, written: str, compiled: Callable[..., Any]) -> None:
    captured = torch.zeros(4)

    def step(state: Any, batch: Tensor) -> Any:
        one, other = (batch, captured) if written == "batch" else (captured, batch)
        one.add_(1)
        return {"w": state["w"] + other}, None

    run, state = compiled(step), {"w": torch.zeros(4)}
    if later:
        state, _ = run(state, torch.zeros(4))
    before = captured.clone()
    with pytest.raises(ValueError, match=f"jit: .*{CLEAN}"):
        run(state, OVER[name](captured))
    assert_same(captured, before)
    run(state, torch.zeros(4))


@pytest.mark.parametrize("name", OVER)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("written", ["batch", "state"])
def test_a_batch_over_the_state(name: str, later: bool, written: str, compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        (batch if written == "batch" else state["w"]).add_(1)
        return {"w": state["w"] * 2}, batch * 1

    run, state = compiled(step), {"w": torch.zeros(4)}
    if later:
        state, _ = run(state, torch.zeros(4))
    with pytest.raises(ValueError, match=f"jit: .*{CLEAN}"):
        run(state, OVER[name](state["w"]))
    run(state, torch.zeros(4))


@pytest.mark.parametrize("later", [False, True])
def test_a_state_over_a_captured_tensor_that_is_written(later: bool, compiled: Callable[..., Any]) -> None:
    captured = torch.zeros(4)

    def step(state: Any, batch: Tensor) -> Any:
        captured.add_(1)
        return {"w": state["w"] * 2}, None

    run = compiled(step)
    if later:
        run({"w": torch.zeros(4)}, torch.zeros(4))
    with pytest.raises(ValueError, match=r"jit: a tensor that .* must share no memory with state\['w'\]"):
        run({"w": captured.view(2, 2).view(4)}, torch.zeros(4))


def test_a_captured_tensor_that_is_given_the_memory_of_another_one() -> None:
    first, second = torch.zeros(4), torch.ones(4)

    def step(state: Any, batch: Tensor) -> Any:
        first.add_(1)
        return {"w": state["w"] + second}, None

    run = jit(step, backend="aot_eager")
    state, _ = run({"w": torch.zeros(4)}, torch.zeros(4))
    second.data = first
    with pytest.raises(ValueError, match=f"jit: .*{CLEAN}"):
        run(state, torch.zeros(4))
    second.data = torch.ones(4)
    assert run(state, torch.zeros(4))[0]["w"].tolist() == [2, 2, 2, 2]


def test_a_captured_tensor_is_written_once_a_call(compiled: Callable[..., Any]) -> None:
    counts = torch.zeros(4)

    def step(state: Any, batch: Tensor) -> Any:
        counts.add_(batch)
        return {"w": state["w"] + counts}, None

    run, state = compiled(step), {"w": torch.zeros(4)}
    for number in (1, 2, 3):
        state, _ = run(state, torch.ones(4))
        assert counts.tolist() == [number] * 4
    assert state["w"].tolist() == [6] * 4


def test_a_batch_norm_that_is_not_part_of_the_state_writes_its_statistics(compiled: Callable[..., Any]) -> None:
    norm, twin = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    run = compiled(lambda state, batch: ({"w": state["w"] + 1}, norm(batch).detach()))
    state, batch = {"w": torch.zeros(())}, torch.rand(4, 3)
    for _ in range(2):
        state, _ = run(state, batch)
        twin(batch)
    torch.testing.assert_close((norm.running_mean, norm.running_var), (twin.running_mean, twin.running_var))
    with pytest.raises(ValueError, match=f"jit: .*{CLEAN}"):
        run(state, norm.running_mean.expand(4, 3))  # type: ignore[union-attr]


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_that_writes_no_input_checks_none(donate: bool) -> None:
    captured = torch.ones(4)
    run = jit(lambda state, batch: ({"w": state["w"] + batch + captured}, None), backend="eager", donate=donate)
    run({"w": torch.zeros(4)}, torch.ones(4))
    assert [executable.written for executable in run._executables.values()] == [None]
