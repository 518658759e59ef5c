"""Two tensors over one memory, whatever their storages: a step gives the eager numbers and writes only its own."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tests.support.helpers import assert_same, clone


def mix(state: Any, batch: Tensor) -> Any:
    a, b = state["a"], state["b"]
    return {"a": a + 1, "b": b * 10 + a.flip(0) + batch}, {"a": a * 1, "b": b[0]}


def shifted_numpy() -> tuple[Tensor, Tensor]:
    array = numpy.arange(6, dtype=numpy.float32)
    return torch.from_numpy(array[:4]), torch.from_numpy(array[2:])


def dlpack() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0)
    return a, from_dlpack(a)


def storage() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0)
    return a, torch.empty(0).set_(a.untyped_storage(), 0, (4,), (1,))


PAIRS = [shifted_numpy, dlpack, storage]


@pytest.mark.parametrize("pair", PAIRS)
def test_two_leaves_of_the_state(pair: Callable[[], tuple[Tensor, Tensor]], compiled: Callable[..., Any]) -> None:
    a, b = pair()
    state, run = {"a": a, "b": b}, compiled(mix)
    expected = clone(state)
    for batch in torch.arange(3.0)[:, None].expand(3, 4):
        expected, numbers = mix(expected, batch)
        state, found = run(state, batch)
        assert_same((state, found), (expected, numbers))


@pytest.mark.parametrize("reverse", [False, True])
def test_two_mappings_of_one_file(tmp_path: Path, reverse: bool, compiled: Callable[..., Any]) -> None:
    """Two addresses, one memory: no address tells."""
    numpy.arange(4, dtype=numpy.float32).tofile(tmp_path / "a")
    a, b = (torch.from_file(str(tmp_path / "a"), shared=True, size=4) for _ in range(2))
    state, run = {"a": b, "b": a} if reverse else {"a": a, "b": b}, compiled(mix)
    expected, _ = mix(clone(state), torch.ones(4))
    state, _ = run(state, torch.ones(4))
    assert_same(state, expected)
    assert numpy.fromfile(tmp_path / "a", dtype=numpy.float32).tolist() == [0, 1, 2, 3]


def replaced(state: Any, batch: Tensor) -> Any:
    return {"a": state["a"] * 0 + batch.flip(0)}, batch.clone()


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda leaf: torch.from_numpy(leaf.numpy()),
    "dlpack": lambda leaf: from_dlpack(leaf.detach()),
    "data": lambda leaf: leaf.data,
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_batch_over_the_memory_of_the_state(name: str, compiled: Callable[..., Any]) -> None:
    run = compiled(replaced)
    state, _ = run({"a": torch.zeros(4)}, torch.arange(4.0))
    for _ in range(3):
        expected, batch = state["a"].flip(0).clone(), state["a"].clone()
        state, found = run(state, ALIASES[name](state["a"]))
        assert_same((state["a"], found), (expected, batch))
    state, found = run({"a": torch.ones(4)}, ALIASES[name](state["a"]))  # another state
    assert_same((state["a"], found), (expected.flip(0), expected))


@pytest.mark.parametrize("name", ALIASES)
def test_a_tensor_that_the_step_reads_over_the_memory_of_the_state(name: str, compiled: Callable[..., Any]) -> None:
    start = torch.arange(4.0)
    anchor = ALIASES[name](start)
    run = compiled(lambda state, batch: ({"a": state["a"] + batch}, (state["a"] - anchor).sum()))
    state: Any = {"a": start}
    moved = []
    for _ in range(3):
        state, metric = run(state, torch.ones(()))
        moved.append(metric.item())
    assert moved == [0, 4, 8]
    state = {"a": ALIASES[name](anchor)}  # a later state over the memory of what the step reads
    for expected in (0, 4):
        state, metric = run(state, torch.ones(()))
        assert metric == expected
    assert anchor.tolist() == [0, 1, 2, 3]


def total(state: Any, batch: Tensor) -> Any:
    return {"a": state["a"] + batch.sum()}, None


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
def test_memory_that_is_not_torchs_own_is_never_written(tmp_path: Path, compiled: Callable[..., Any]) -> None:
    """Writing to pages that cannot be written is a segmentation fault; another process may read what is shared."""
    numpy.zeros(4, dtype=numpy.float32).tofile(tmp_path / "a")
    with (tmp_path / "a").open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")
    leaves = [torch.from_numpy(numpy.memmap(tmp_path / "a", dtype=numpy.float32, mode="r"))]
    leaves += [torch.frombuffer(memory, dtype=torch.float32) for memory in (pages, bytes(16))]
    leaves += [torch.load(tmp_path / "a.pt", mmap=True)["a"], torch.zeros(4).share_memory_()]
    run = compiled(total)
    for first in leaves:
        state: Any = {"a": first}  # after the first time a state from elsewhere
        for _ in range(2):
            state, _ = run(state, torch.ones(2))
        assert state["a"].tolist() == [4, 4, 4, 4]
        assert first.tolist() == [0, 0, 0, 0]


REBOUND: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda target, leaf: setattr(target, "data", leaf),
    "numpy": lambda target, leaf: setattr(target, "data", torch.from_numpy(leaf.numpy())),
}


@pytest.mark.parametrize("name", REBOUND)
def test_a_tensor_that_the_step_reads_is_later_given_the_memory_of_the_state(
    name: str, compiled: Callable[..., Any]
) -> None:
    target = torch.zeros(4)

    def step(state: Any, batch: Tensor) -> Any:
        return {"a": state["a"] + 1}, target * 1

    run = compiled(step)
    state, _ = run({"a": torch.arange(4.0)}, torch.ones(1))
    REBOUND[name](target, state["a"])
    if run._sharing.memory.graphs is not None:  # the graph reads the old address
        with pytest.raises(RuntimeError, match=r"jit: step must find .*float32 tensor of shape \(4,\) .*\.data"):
            run(state, torch.ones(1))
        assert state["a"].tolist() == [1, 2, 3, 4]
        return
    for _ in range(3):
        state, metric = run(state, torch.ones(1))
        assert metric.tolist() == target.tolist() == [1, 2, 3, 4]
    assert state["a"].tolist() == [4, 5, 6, 7]
    target.data = torch.full((4,), 9.0)  # memory of its own: read by reference
    assert run(state, torch.ones(1))[1].tolist() == [9, 9, 9, 9]


def plus(state: Any, batch: Tensor) -> Any:
    return {name: leaf + batch for name, leaf in state.items()}, None


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "transposed": lambda leaf: leaf.t_(),
    "other strides": lambda leaf: setattr(leaf, "data", torch.arange(9.0).view(3, 3).t()),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_leaf_changed_in_place_between_calls(name: str, compiled: Callable[..., Any]) -> None:
    run = compiled(plus)
    state, _ = run({"w": torch.arange(9.0).view(3, 3), "b": torch.zeros(3)}, torch.zeros(()))
    IN_PLACE[name](state["w"])
    expected = state["w"].clone()
    for index in range(3):
        state, _ = run(state, torch.ones(()))
        assert_same(state["w"], expected + index + 1)
    assert state["b"].tolist() == [3, 3, 3]


def test_the_state_may_be_written_in_place(compiled: Callable[..., Any]) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        state["w"].add_(batch)
        return {"w": state["w"] * 2}, state["w"] * 1

    run, state = compiled(step), {"w": torch.zeros(4)}
    for expected in (1.0, 3.0):
        state, written = run(state, torch.ones(4))
        assert_same(written, torch.full((4,), expected))


def test_parts_of_a_batch_that_are_only_read_may_share_memory(compiled: Callable[..., Any]) -> None:
    memory = torch.arange(8.0)
    run, state = compiled(lambda state, batch: ({"w": batch[0] - batch[1]}, None)), {"w": torch.zeros(4)}
    for other in (memory[:4], torch.ones(4), memory[3:7], memory[::2]):
        state, _ = run(state, (memory[:4], other))
        assert_same(state["w"], memory[:4] - other)
    assert run.programs == 1
