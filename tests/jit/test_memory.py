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
from funcamp._jit import cuda_graph, executable
from funcamp._memory import Memory
from tests.support.helpers import assert_same, clone
from tests.support.stand_in import StandIn

MODES = ["donated", "captured", "undonated"]


@pytest.fixture(params=MODES)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`jit` by a compiler that generates no code; captured, into a stand-in for a CUDA graph."""
    if request.param == "captured":
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    return lambda step, **options: jit(step, backend="aot_eager", donate=request.param != "undonated", **options)


def mix(state: Any, batch: Tensor) -> Any:
    a, b = state["a"], state["b"]
    return {"a": a + 1, "b": b * 10 + a.flip(0) + batch}, {"a": a * 1, "b": b[0]}


def own_numpy() -> tuple[Tensor, Tensor]:
    array = numpy.arange(4, dtype=numpy.float32)
    return torch.from_numpy(array), torch.from_numpy(array)


def shifted_numpy() -> tuple[Tensor, Tensor]:
    array = numpy.arange(6, dtype=numpy.float32)
    return torch.from_numpy(array[:4]), torch.from_numpy(array[2:])


def numpy_of_a_tensor() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0)
    return a, torch.from_numpy(a.numpy())


def dlpack() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0)
    return a, from_dlpack(a)


def buffer() -> tuple[Tensor, Tensor]:
    memory = bytearray(numpy.arange(4, dtype=numpy.float32).tobytes())
    return torch.frombuffer(memory, dtype=torch.float32), torch.frombuffer(memory, dtype=torch.float32)


def storage() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0)
    return a, torch.empty(0).set_(a.untyped_storage(), 0, (4,), (1,))


def shared() -> tuple[Tensor, Tensor]:
    a = torch.arange(4.0).share_memory_()
    return a, torch.from_numpy(a.numpy())


PAIRS = [own_numpy, shifted_numpy, numpy_of_a_tensor, dlpack, buffer, storage, shared]


@pytest.mark.parametrize("pair", PAIRS)
def test_two_leaves_of_the_state(pair: Callable[[], tuple[Tensor, Tensor]], compiled: Callable[..., Any]) -> None:
    a, b = pair()
    state, run = {"a": a, "b": b}, compiled(mix)
    expected = clone(state)
    for index in range(3):
        batch = torch.full((4,), float(index))
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
    "view": lambda leaf: leaf.view(2, 2).view(4),
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


@pytest.mark.parametrize("name", ALIASES)
def test_another_state_and_a_batch_over_the_memory_of_the_last_one(name: str, compiled: Callable[..., Any]) -> None:
    run = compiled(replaced)
    state, _ = run({"a": torch.zeros(4)}, torch.arange(4.0))
    batch = ALIASES[name](state["a"])
    state, found = run({"a": torch.ones(4)}, batch)
    assert_same((state["a"], found), (torch.arange(4.0), torch.arange(4.0).flip(0)))


@pytest.mark.parametrize("name", ALIASES)
def test_steps_in_one_call_and_a_batch_over_the_memory_of_the_state(name: str, compiled: Callable[..., Any]) -> None:
    run = compiled(lambda state, batch: ({"a": state["a"] + batch.sum()}, None), unroll=2)
    state, _ = run({"a": torch.arange(4.0)}, torch.zeros(2, 2))
    state, _ = run(state, ALIASES[name](state["a"]).view(2, 2))
    assert_same(state["a"], torch.arange(4.0) + 6)


def test_a_state_that_no_one_holds_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    run, kept = jit(replaced, backend="aot_eager"), []
    run({"a": torch.zeros(4)}, torch.arange(4.0))
    monkeypatch.setattr(Tensor, "set_", lambda *args: kept.append(args))
    held, _ = run({"a": torch.ones(4)}, torch.arange(4.0))
    assert not kept
    run({"a": torch.ones(4)}, torch.arange(4.0))
    assert len(kept) == 1
    assert held is not None


def test_a_batch_partly_over_the_memory_of_the_state(compiled: Callable[..., Any]) -> None:
    run, memory = compiled(lambda state, batch: ({"a": state["a"] + batch.flip(0)}, None)), torch.arange(6.0)
    state, _ = run({"a": memory[1:5]}, torch.zeros(4))
    batch = torch.from_numpy(memory.numpy()[2:])
    expected = state["a"] + batch.flip(0)
    state, _ = run(state, batch)
    assert_same(state["a"], expected)


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
    assert anchor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ALIASES)
def test_a_later_state_over_the_memory_of_a_tensor_that_the_step_reads(name: str, compiled: Callable[..., Any]) -> None:
    anchor = torch.arange(4.0)
    run = compiled(lambda state, batch: ({"a": state["a"] + batch}, (state["a"] - anchor).sum()))
    run({"a": torch.zeros(4)}, torch.ones(()))
    state: Any = {"a": ALIASES[name](anchor)}
    for expected in (0, 4):
        state, metric = run(state, torch.ones(()))
        assert metric == expected
    assert anchor.tolist() == [0, 1, 2, 3]


def test_a_tensor_in_the_memory_of_the_state_that_a_later_program_reads(
    compiled: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    state: Any = {"a": torch.zeros(4)}
    anchor = state["a"].detach()

    def step(state: Any, batch: Tensor) -> Any:
        return {"a": state["a"] + 1}, anchor.sum() if len(batch) == 3 else None

    run = compiled(step)
    state, _ = run(state, torch.ones(2))
    if request.node.callspec.params["compiled"] == "captured":  # the graph of the first program would write into it
        with pytest.raises(RuntimeError, match=r"jit: step must read no tensor .* in the memory of the state, where"):
            run(state, torch.ones(3))
        assert run(state, torch.ones(2))[0]["a"].tolist() == [2] * 4
        return
    for size in (3, 2, 3):
        before = anchor.sum()
        state, metric = run(state, torch.ones(size))
        assert metric is None or metric == before
    assert state["a"].tolist() == [4] * 4


def total(state: Any, batch: Tensor) -> Any:
    return {"a": state["a"] + batch.sum()}, None


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
def test_immutable_bytes_stay_as_they_are(compiled: Callable[..., Any]) -> None:
    memory = bytes(16)
    run, state = compiled(total), {"a": torch.frombuffer(memory, dtype=torch.float32)}
    for _ in range(2):
        state, _ = run(state, torch.ones(2))
    assert state["a"].tolist() == [4, 4, 4, 4]
    assert memory == bytes(16)


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
def test_pages_that_cannot_be_written(tmp_path: Path, compiled: Callable[..., Any]) -> None:
    """Writing them is a segmentation fault."""
    numpy.zeros(4, dtype=numpy.float32).tofile(tmp_path / "a")
    array = numpy.memmap(tmp_path / "a", dtype=numpy.float32, mode="r")
    with (tmp_path / "a").open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    run = compiled(total)
    for first in (torch.from_numpy(array), torch.frombuffer(pages, dtype=torch.float32)):
        state: Any = {"a": first}  # the second time a state from elsewhere
        for _ in range(2):
            state, _ = run(state, torch.ones(2))
        assert state["a"].tolist() == [4, 4, 4, 4]


def test_memory_that_torch_did_not_allocate_is_left_alone(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "a.pt")
    mapped = torch.load(tmp_path / "a.pt", mmap=True)
    array = numpy.zeros(4, dtype=numpy.float32)
    common = torch.zeros(4).share_memory_()  # another process may read it
    for leaf in (torch.from_numpy(array), mapped["a"], common):
        state, _ = jit(total, backend="aot_eager")({"a": leaf}, torch.ones(2))
        assert state["a"].tolist() == [2, 2, 2, 2]
        assert leaf.tolist() == [0, 0, 0, 0]


def test_memory_of_torch_is_donated() -> None:
    base = torch.zeros(4)
    state = {"a": base, "b": torch.ones(2, 2).t()}
    after, _ = jit(lambda state, batch: ({k: leaf + 1 for k, leaf in state.items()}, None), backend="aot_eager")(
        state, torch.ones(1)
    )
    assert after is state
    assert base.tolist() == [1, 1, 1, 1]


def test_memory_meets_what_shares_a_byte_of_a_storage() -> None:
    base = torch.zeros(16)
    memory = Memory([base[4:8], torch.zeros(3), torch.zeros(0)])  # ranges of storages: a slice takes all of its own
    assert memory.meets(base[:2])
    assert memory.meets(torch.from_numpy(base.numpy()[9::3]))
    assert not memory.meets(torch.zeros(16))
    assert not memory.meets(base[:0])
    assert not memory.meets(torch.empty(4, device="meta"))
    start = base.data_ptr()
    for low, size, free in (
        (-8, 8, True),
        (-8, 9, False),
        (0, 1, False),
        (64, 8, True),
        (63, 8, False),
        (-8, 99, False),
    ):
        assert Memory([base]).is_free(start + low, size) is free
    memory = Memory([])
    assert memory.is_free(start, 64)
    halves = [torch.from_numpy(base.numpy()[i : i + 4]) for i in (8, 4, 6)]
    for half in halves:
        memory.add(half)
    assert memory.is_free(start, 16)
    assert not memory.is_free(start + 40, 1)
    assert memory.is_free(start + 48, 1)


REBOUND: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda target, leaf: setattr(target, "data", leaf),
    "set": lambda target, leaf: target.set_(leaf.detach()),  # type: ignore[call-overload]
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


def test_a_tensor_that_the_step_reads_is_later_given_other_strides() -> None:
    target = torch.arange(4.0).view(2, 2)
    run = jit(lambda state, batch: ({"a": state["a"] + target}, None), backend="aot_eager")
    state, _ = run({"a": torch.zeros(2, 2)}, torch.ones(1))
    target.t_()
    with pytest.raises(RuntimeError, match=r"jit: step must find .*shape \(2, 2\) .* t_\)"):
        run(state, torch.ones(1))
    target.t_()
    assert run(state, torch.ones(1))[0]["a"].tolist() == [[0, 2], [4, 6]]


def plus(state: Any, batch: Tensor) -> Any:
    return {name: leaf + batch for name, leaf in state.items()}, None


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "transposed": lambda leaf: leaf.t_(),
    "other memory": lambda leaf: setattr(leaf, "data", torch.full((3, 3), 7.0)),
    "other strides": lambda leaf: setattr(leaf, "data", torch.arange(9.0).view(3, 3).t()),
    "shared": lambda leaf: leaf.share_memory_(),
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


def test_another_shape_in_place_is_an_error(compiled: Callable[..., Any]) -> None:
    run = compiled(plus)
    state, _ = run({"w": torch.zeros(2, 3)}, torch.zeros(()))
    state["w"].t_()
    with pytest.raises(ValueError, match=r"jit: state must have the shapes.*at \['w'\] it has .*\(3, 2\)"):
        run(state, torch.ones(()))
    state["w"].t_()
    assert_same(run(state, torch.ones(()))[0]["w"], torch.ones(2, 3))


def test_a_leaf_of_many_changed_in_place_under_a_graph_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn())
    run = jit(plus, backend="aot_eager")
    state, _ = run({str(index): torch.zeros(2, 2) for index in range(40)}, torch.ones(()))
    state["35"].data = torch.full((2, 2), 5.0)
    state, _ = run(state, torch.ones(()))
    assert_same(state["35"], torch.full((2, 2), 6.0))
    assert_same(state["34"], torch.full((2, 2), 2.0))


@pytest.mark.inductor
def test_a_leaf_transposed_in_place_under_compiled_code() -> None:
    for donate in (True, False):
        run = jit(plus, donate=donate)
        state, _ = run({"w": torch.arange(9.0).view(3, 3)}, torch.zeros(()))
        state["w"].t_()
        assert_same(run(state, torch.ones(()))[0]["w"], torch.arange(9.0).view(3, 3).t() + 1)


@pytest.mark.inductor
def test_a_new_state_in_other_strides_than_the_first() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"].t() + batch}, None

    run, expected = jit(step, donate=False), torch.arange(9.0).view(3, 3)
    state: Any = {"w": expected}
    for _ in range(3):
        expected = expected.t() + 1
        state, _ = run(state, torch.ones(()))
        assert_same(state["w"], expected)


@pytest.mark.inductor
@pytest.mark.parametrize("donate", [True, False])
def test_results_that_the_compiler_finds_equal_to_inputs_have_memory_of_their_own(donate: bool) -> None:
    constant = torch.arange(4.0)

    def step(state: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        x, gate, number = batch["x"], batch["gate"], batch["number"]
        equal = [x * torch.ones(4), x + torch.zeros(4), x - 0 * torch.ones(4), x / torch.ones(4), (x * 1)[1:] * 1]
        equal += [x.double().float(), x.view(2, 2).transpose(0, 1).mT.reshape(4) * 1, torch.cat([x]), gate | False]
        equal += [number * torch.ones(4, dtype=torch.int64), constant * torch.ones(4), state * torch.ones(4), x]
        return state * torch.ones(4), equal

    run = jit(step, donate=donate)
    state = torch.arange(4.0)
    batch = {"x": torch.arange(4.0), "gate": torch.ones(4, dtype=torch.bool), "number": torch.arange(4)}
    expected = clone(step(state, batch))
    new, found = run(state, batch)
    given = [*batch.values(), constant, *([] if donate else [state])]
    for value in [*found, *([] if donate else [new])]:
        assert not any(Memory([value]).meets(other) for other in given)
    for value in given:
        value.zero_()
    assert_same((new, found), expected)


@pytest.mark.inductor
def test_results_that_are_equal_to_one_input_share_no_memory() -> None:
    def step(state: Any, x: Tensor) -> Any:
        ones = torch.ones(4)
        return {"a": x * ones, "b": x + torch.zeros(4)}, x * ones

    state, metric = jit(step, donate=False)({"a": torch.zeros(4), "b": torch.zeros(4)}, torch.arange(4.0))
    state["a"].add_(1)
    assert_same((state["b"], metric), (torch.arange(4.0), torch.arange(4.0)))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_state_that_has_a_part_of_the_last_one_or_of_the_batch_shares_no_memory_with_it(backend: str) -> None:
    def step(state: Any, x: Tensor) -> Any:
        return {"kept": state["kept"], "last": x, "view": state["last"][1:], "sum": state["sum"] + x.sum()}, x.mean()

    first = {"kept": torch.ones(3), "last": torch.zeros(3), "view": torch.zeros(2), "sum": torch.zeros(())}
    x, before = torch.full((3,), 2.0), clone(first)
    second, _ = jit(step, backend=backend, donate=False)(first, x)
    given = Memory([*first.values(), x])
    assert not any(given.meets(leaf) for leaf in second.values())
    jit(step, backend=backend)(second, torch.full((3,), 5.0))
    assert_same((first, x), (before, torch.full((3,), 2.0)))


def test_a_tensor_that_a_failed_compilation_read_may_get_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(4.0).view(2, 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    run = jit(lambda state, batch: (state + table, batch * 1), backend="aot_eager")
    with monkeypatch.context() as patch:
        patch.setattr(executable, "compile_graph", fail)
        with pytest.raises(RuntimeError, match="cannot be compiled: no space left"):
            run(torch.zeros(2, 2), torch.ones(()))
    table.t_()
    assert_same(run(torch.zeros(2, 2), torch.ones(()))[0], table + 0)
