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

from funcamp import jit
from funcamp._memory import overlaps
from tests.support.helpers import assert_same, clone

Compiled = Callable[..., Any]


def assert_follows(step: Any, run: Any, state: Any, batches: Any) -> Any:
    """Compare with eager steps on copies, in which no two tensors share memory; return the last state."""
    expected = clone(state)
    for batch in batches:
        expected, numbers = step(expected, clone(batch))
        state, found = run(state, batch)
        assert_same((state, found), (expected, numbers))
    return state


# The state


def shifted_numpy(_: Path) -> list[Tensor]:
    array = numpy.arange(6, dtype=numpy.float32)
    return [torch.from_numpy(array[:4]), torch.from_numpy(array[2:])]


def views(_: Path) -> list[Tensor]:
    one = torch.arange(8.0)
    parts = [one, one, one[2:5], one.view(2, 4).t(), one.unfold(0, 3, 1), from_dlpack(one)]
    return [*parts, torch.zeros(0, 2), torch.ones(3).expand(2, 3), torch.nn.Parameter(torch.ones(2))]


def one_file_twice(path: Path) -> list[Tensor]:
    """Two addresses, one memory: no address tells."""
    numpy.arange(4, dtype=numpy.float32).tofile(path / "a")
    return [torch.from_file(str(path / "a"), shared=True, size=4) for _ in range(2)]


def not_torchs(path: Path) -> list[Tensor]:
    """Writing to pages that cannot be written is a segmentation fault; another process may read what is shared."""
    numpy.zeros(4, dtype=numpy.float32).tofile(path / "a")
    with (path / "a").open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    torch.save(torch.zeros(4), path / "a.pt")
    leaves = [torch.from_numpy(numpy.memmap(path / "a", dtype=numpy.float32, mode="r"))]
    leaves += [torch.frombuffer(memory, dtype=torch.float32) for memory in (pages, bytes(16))]
    return [*leaves, torch.load(path / "a.pt", mmap=True), torch.zeros(4).share_memory_()]


def mix(state: list[Tensor], batch: Tensor) -> Any:
    """Every leaf has another factor, and reads the last number of the first one."""
    new = [leaf * (2 + number) + state[0][-1] + batch.sum() for number, leaf in enumerate(state)]
    return new, {"first": state[0] * 1, "row": state[-1][0]}


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
@pytest.mark.parametrize("make", [shifted_numpy, views, one_file_twice, not_torchs])
def test_leaves_of_the_state_in_any_memory(make: Any, tmp_path: Path, compiled: Compiled) -> None:
    run = compiled(mix)
    for number in range(2):  # after the first time a state from elsewhere
        path = tmp_path / str(number)
        path.mkdir()
        leaves = make(path)
        before = clone(leaves)
        assert_follows(mix, run, leaves, torch.arange(3.0)[:, None].expand(3, 4))
        if make in (shifted_numpy, one_file_twice, not_torchs):  # memory that is not torch's own is never written
            assert_same(leaves, before)


def plus(state: Any, batch: Tensor) -> Any:
    return {name: leaf + batch for name, leaf in state.items()}, None


BETWEEN: dict[str, Callable[[Any], object]] = {
    "another tensor": lambda state: state.update(w=torch.ones(3, 3)),
    "other numbers": lambda state: state["w"].fill_(20.0),
    "transposed": lambda state: state.update(w=state["w"].t()),
    "other memory": lambda state: state.update(w=torch.arange(9.0).view(3, 3).t()),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_happens_to_the_state_between_calls_is_followed(name: str, compiled: Compiled) -> None:
    run = compiled(plus)
    state, _ = run({"w": torch.arange(9.0).view(3, 3), "b": torch.zeros(3)}, torch.zeros(()))
    BETWEEN[name](state)
    assert_follows(plus, run, state, torch.ones(3))


def transposed(state: Any, batch: Tensor) -> Any:
    return {"w": state["w"].t() * 2 + batch, "b": state["b"]}, None


def test_a_next_state_of_other_strides(compiled: Compiled) -> None:
    run = compiled(transposed)
    state = {"w": torch.arange(9.0).view(3, 3), "b": torch.zeros(3)}
    for _ in range(3):
        state = assert_follows(transposed, run, state, torch.ones(2, 1))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_columns_of_a_matrix_stay_what_they_are(backend: str) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"columns": state["columns"], "sum": state["sum"] + (state["columns"] * batch).sum(1)}, None

    columns = torch.arange(24.0).view(4, 6)[:, :3]
    run = jit(step, backend=backend, donate=False)
    assert_follows(step, run, {"columns": columns, "sum": torch.zeros(4)}, torch.ones(3, 4, 3))


def test_the_state_may_be_written_in_place(compiled: Compiled) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        state["w"].add_(batch)
        return {"w": state["w"] * 2}, state["w"] * 1

    assert_follows(step, compiled(step), {"w": torch.zeros(4)}, torch.ones(2, 1))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_backward_pass_that_saved_a_leaf_is_an_error_after_a_donated_step(backend: str) -> None:
    run, x = jit(plus, backend=backend), torch.ones(3, requires_grad=True)
    state, _ = run({"w": torch.ones(3, 3), "b": torch.zeros(3)}, torch.zeros(()))
    loss = (x * state["b"]).sum()
    run(state, torch.zeros(()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The batch, and what a step reads besides its arguments


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda leaf: torch.from_numpy(leaf.numpy()),
    "data": lambda leaf: leaf.data,
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_batch_over_the_memory_of_the_state(name: str, compiled: Compiled) -> None:
    def replaced(state: Any, batch: Tensor) -> Any:
        return {"a": state["a"] * 0 + batch.flip(0)}, batch.clone()

    run = compiled(replaced)
    state, _ = run({"a": torch.zeros(4)}, torch.arange(4.0))
    for _ in range(3):
        state = assert_follows(replaced, run, state, [ALIASES[name](state["a"])])
    assert_follows(replaced, run, {"a": torch.ones(4)}, [ALIASES[name](state["a"])])  # another state


@pytest.mark.parametrize("name", ALIASES)
def test_a_tensor_that_the_step_reads_over_the_memory_of_the_state(name: str, compiled: Compiled) -> None:
    start = torch.arange(4.0)
    anchor = ALIASES[name](start)
    run = compiled(lambda state, batch: ({"a": state["a"] + batch}, (state["a"] - anchor).sum()))
    for state in ({"a": start}, {"a": ALIASES[name](anchor)}):  # and later over the memory of what the step reads
        for expected in (0, 4, 8):
            state, metric = run(state, torch.ones(()))
            assert metric == expected
    assert anchor.tolist() == [0, 1, 2, 3]


def test_a_tensor_that_the_step_reads_is_later_given_the_memory_of_the_state(mode: str, compiled: Compiled) -> None:
    target = torch.zeros(4)
    run = compiled(lambda state, batch: ({"a": state["a"] + 1}, target * 1))
    state, _ = run({"a": torch.arange(4.0)}, torch.ones(1))
    target.data = state["a"]
    if mode == "captured":  # the graph reads the old address
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


# The results


CAPTURED, EMPTY = torch.arange(4.0), torch.zeros(0)


def equal_ones(state: Any, x: Tensor) -> Any:
    """Every kind of result that is equal to another one or to an input, as one program: compiling takes long."""
    w, ones = state["w"] + x, torch.ones(4)
    new = {"w": w, "ema": w + 0, "same": w, "old": state["w"] * 1, "kept": state["kept"], "view": w.view(2, 2)}
    new |= {"captured": CAPTURED, "joined": torch.cat([EMPTY, CAPTURED])}
    parts = [w, w.view(2, 2).view(-1), w[1:3], w[:1].expand(4), w.view(torch.int32), state["kept"], state["w"]]
    others = [w.sum(), w.sum() + 0, x, x[2:], CAPTURED, CAPTURED.view(2, 2) * 1, CAPTURED * ones, state["w"] * ones]
    equal = [x * ones, x + torch.zeros(4), (x * 1)[1:] * 1, x.double().float(), torch.cat([x])]
    constants = [EMPTY, EMPTY + 1, torch.tensor(3.0), torch.tensor([1.0, 2.0]) * CAPTURED[:2], CAPTURED * x]
    return new, [*parts, *others, *equal, *constants]


@pytest.mark.thorough(keep=9)  # of those that generate code, one
@pytest.mark.parametrize("unroll", [None, 2])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_no_two_results_share_memory_and_none_an_inputs(backend: str, donate: bool, unroll: int | None) -> None:
    names = ("w", "ema", "same", "old", "kept", "view", "captured", "joined")
    state: Any = dict.fromkeys(names, torch.zeros(4)) | {"view": torch.zeros(2, 2)}
    run, expected, tensors = jit(equal_ones, backend=backend, donate=donate, unroll=unroll), clone(state), [CAPTURED]
    for _ in range(2):
        x = torch.randint(9, (unroll or 1, 4)).float()  # exact sums
        rows = []
        for row in x:
            expected, metrics = clone(equal_ones(expected, row))
            rows.append(metrics)
        given = x if unroll else x[0]
        state, found = run(state, given)
        assert_same((state, found), (expected, [*map(torch.stack, zip(*rows))] if unroll else rows[0]))
        tensors += [given, *found, *(() if donate else state.values())]
    named = {str(number): leaf for number, leaf in enumerate([*tensors, *(state.values() if donate else ())])}
    assert list(overlaps(named)) == []
