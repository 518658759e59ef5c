"""`jit` runs the step it is given: one program a batch signature, clear refusals, nothing lost by bad input."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from funcamp import ScalerConfig, clone, jit, stateless
from funcamp._jit import compile as compiler
from funcamp._jit import executable
from tests.support.helpers import assert_same
from tests.support.models import mlp
from tests.support.steps import build

Step = Callable[[Any, Any], Any]


def eager_backend(step: Step, **options: Any) -> Any:
    return jit(step, backend="eager", **options)


def add(state: Any, batch: Any) -> Any:
    """Adds the batch to the state; reports both."""
    total = state["total"] + batch["x"].sum() * batch.get("times", 1)
    return {**state, "total": total}, {"total": total, "name": "sum", "nothing": None}


def start() -> dict[str, Any]:
    return {"total": torch.zeros(()), "rest": [torch.ones(2, 2), None]}


CONFIG = ScalerConfig(2.0**24, growth_interval=5)


def test_the_state_passed_in_is_consumed_and_clone_keeps_one() -> None:
    run, first = eager_backend(add), start()
    kept = clone(first)
    second, _ = run(first, {"x": torch.ones(1)})
    assert second is first
    third, _ = run(second, {"x": torch.ones(1)})
    assert first["total"] == third["total"] == 2
    assert kept["total"] == 0
    assert run(kept, {"x": torch.ones(1)})[0]["total"] == 1
    assert third["total"] == 2  # another state's step leaves this one alone
    assert run(third, {"x": torch.ones(1)})[0]["total"] == 3


def test_without_donation_the_state_stays() -> None:
    run, first = eager_backend(add, donate=False), start()
    second, _ = run(first, {"x": torch.ones(1)})
    third, _ = run(second, {"x": torch.ones(1)})
    assert [s["total"].item() for s in (first, second, third)] == [0, 1, 2]
    again, _ = run(first, {"x": torch.ones(1)})
    assert again["total"] == 1


def test_a_leaf_put_into_the_state_between_calls_is_used() -> None:
    run, state = eager_backend(add), start()
    state, _ = run(state, {"x": torch.ones(1)})
    state["total"] = torch.tensor(10.0)
    state, _ = run(state, {"x": torch.ones(1)})
    assert state["total"] == 11
    state["total"].fill_(20.0)
    assert run(state, {"x": torch.ones(1)})[0]["total"] == 21


def test_steps_in_one_call_are_as_many_calls() -> None:
    task = mlp()
    step = build(task, stateless(torch.optim.AdamW, lr=1e-2), policy="float16", config=CONFIG)
    run, expected, rows = eager_backend(step), step.init(), []
    for index in range(6):
        expected, metrics = run(expected, task.batch(index))
        rows.append(metrics)
    run, state, found = eager_backend(step, unroll=3), step.init(), []
    for index in (0, 3):
        pieces = [task.batch(index + part) for part in range(3)]
        state, metrics = run(state, tuple(torch.stack(column) for column in zip(*pieces)))
        found += [type(metrics)(*(torch.utils._pytree.tree_map(lambda m, i=i: m[i], metrics))) for i in range(3)]
    assert_same((state, found), (expected, rows))


REPLACED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (lambda s: s.update(a=torch.zeros((), dtype=torch.int32)), r"at \['a'\] it has a torch.int32"),
    "shape": (lambda s: s.update(b=torch.zeros(2)), r"at \['b'\] it has .* shape \(2,\)"),
    "no leaf": (lambda s: s.pop("a"), "they part at leaf 0"),
    "keys swapped": (lambda s: s.update(x=s.pop("a"), y=s.pop("b")), "they part at leaf 0"),
}


@pytest.mark.parametrize("change", REPLACED)
def test_a_state_changed_in_place_is_checked_like_a_new_one(change: str) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {name: leaf + batch for name, leaf in state.items()}, None

    run, act, message = eager_backend(step), *REPLACED[change]
    state, _ = run({"a": torch.zeros(()), "b": torch.ones(())}, torch.ones(()))
    act(state)
    with pytest.raises(ValueError, match=message):
        run(state, torch.ones(()))
    state, _ = run({"a": torch.zeros(()), "b": torch.ones(())}, torch.ones(()))
    assert [leaf.item() for leaf in state.values()] == [1, 2]


def test_a_first_call_that_fails_binds_nothing() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {**state, "x": state["x"] + state["y"] * batch.sum()}, None

    run = eager_backend(step)
    with pytest.raises((KeyError, RuntimeError), match="y"):
        run({"x": torch.zeros(())}, torch.ones(2))
    state, _ = run({"x": torch.zeros(()), "y": torch.ones(())}, torch.ones(2))
    assert state["x"].item() == 2


def test_a_state_made_in_inference_mode_is_taken_over() -> None:
    with torch.inference_mode():
        state = start()
    after, _ = eager_backend(add)(state, X)
    assert after["total"].item() == 2
    assert not after["total"].is_inference()


X = {"x": torch.ones(2)}


def test_a_refused_call_loses_nothing() -> None:
    run, state = eager_backend(add, max_signatures=2), start()
    state, _ = run(state, X)
    before = clone(state)
    other: dict[str, Any] = {"total": torch.zeros(2), "rest": state["rest"]}
    with pytest.raises(ValueError, match=r"jit: state must have .* at \['total'\] it has .*shape \(2,\)"):
        run(other, X)
    with pytest.raises(ValueError, match="one tree structure"):
        run({"total": torch.zeros(())}, X)
    run(state, {"x": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"at most 2 signatures.*batch\['x'\] changed from .*\(3,\) on cpu to .*\(4,\)"
    ):
        run(state, {"x": torch.ones(4)})
    with pytest.raises(ValueError, match=r"its structure changed"):
        run(state, [torch.ones(4)])
    state, _ = run(state, X)
    assert state["total"] == before["total"] + 5


def test_without_a_compiler_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler on a CPU.*install it"):
        jit(add)(start(), X)


def test_steps_that_compute_nothing_or_only_constants() -> None:
    run = eager_backend(lambda state, batch: (state, (batch, torch.ones(2).sum())))
    for batch in (torch.zeros(3), torch.ones(3)):
        state, metrics = run({"a": torch.ones(2)}, batch)
    assert_same((state, metrics), ({"a": torch.ones(2)}, (torch.ones(3), torch.tensor(2.0))))
    assert_same(eager_backend(lambda state, batch: (state, torch.ones(2)))((), ())[1], torch.ones(2))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_failure_at_work_leaves_the_state_and_names_the_operation(backend: str) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + 1}, torch.nn.functional.embedding(batch, state["w"])

    run, state = jit(step, backend=backend), {"w": torch.zeros(3, 2)}
    with pytest.raises((IndexError, RuntimeError), match=r"index out of range|embedding.*index out of bounds"):
        run(state, torch.tensor([7]))
    assert state["w"].sum().item() == 0


@pytest.mark.parametrize("donate", [True, False])
def test_no_tensor_of_a_call_is_kept(donate: bool) -> None:
    def storages(tree: Any) -> list[StorageWeakRef]:
        return [StorageWeakRef(leaf.untyped_storage()) for leaf in _pytree.tree_leaves(tree)]

    def add_and_count(state: Any, batch: Tensor) -> Any:
        return {"sum": state["sum"] + batch}, {"double": 2 * batch, "same": batch}

    run, state, dropped = jit(add_and_count, donate=donate, backend="aot_eager"), {"sum": torch.zeros(8)}, []
    for index in range(3):
        batch = torch.full((8,), float(index))
        before = storages(batch) if donate else storages((state, batch))
        state, metrics = run(state, batch)
        dropped += before + storages(metrics)
        del batch, metrics
    assert all(storage.expired() for storage in dropped)
    last = storages(state)
    del state, run
    gc.collect()
    assert all(storage.expired() for storage in last)


def test_a_constant_that_changes_drops_the_oldest_program(caplog: pytest.LogCaptureFixture) -> None:
    run, state = eager_backend(add, max_signatures=2), start()
    for times in (1, 0, 2, 1, 3):
        expected = state["total"] + 2 * times
        state, _ = run(state, {"x": torch.ones(2), "times": times})
        assert state["total"] == expected
        assert run.programs <= 2
    assert state["rest"][1] is None
    (dropped,) = [record.getMessage() for record in caplog.records if "at most 2 programs" in record.getMessage()]
    assert "batch['times'] changed from 0 to 2" in dropped


# When a further signature is compiled


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs are given to; their operations run one by one."""
    asked: list[str] = []

    def compile_graph(graph: Any, target: Any, *_: Any, **__: Any) -> Any:
        asked.append(target.backend)
        return compiler.compile_graph(graph, target._replace(backend="eager"))

    monkeypatch.setattr(executable, "compile_graph", compile_graph)
    return asked


@pytest.mark.parametrize(("donate", "unroll"), [(True, None), (False, 2)])
def test_a_further_signature_is_compiled_when_it_has_come_often(
    backends: list[str], donate: bool, unroll: int | None
) -> None:
    run = jit(add, backend="inductor", compile_after=2, donate=donate, unroll=unroll)
    state: Any = {"total": torch.zeros(())}
    expected, lead = 0.0, () if unroll is None else (unroll,)
    for size in (4, 4, 3, 3, 3, 3, 4, 5):
        state, metrics = run(state, {"x": torch.ones(*lead, size)})
        expected += (unroll or 1) * size
        assert state["total"] == expected == metrics["total"].flatten()[-1]
    assert backends == ["inductor", "eager", "inductor", "eager"]
    assert run.programs == 3


@pytest.mark.parametrize("compile_after", [3, 0])
def test_a_program_that_is_not_compiled_yet_says_so(
    backends: list[str], caplog: pytest.LogCaptureFixture, compile_after: int
) -> None:
    run, state = jit(add, backend="inductor", compile_after=compile_after), start()
    with caplog.at_level("INFO", "funcamp"):
        for size in (2, 3):
            state, _ = run(state, {"x": torch.ones(size)})
    lines = [text for record in caplog.records if "one by one" in (text := record.getMessage())]
    assert state["total"] == 5
    assert backends == ["inductor", "eager" if compile_after else "inductor"]
    assert len(lines) == bool(compile_after)
    assert all("for its first 3 calls; it is compiled at the next one" in line for line in lines)
