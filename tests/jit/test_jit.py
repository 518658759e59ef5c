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

from funcamp import clone, jit
from funcamp._jit import compile as compiler
from funcamp._jit import executable

Step = Callable[[Any, Any], Any]


def eager_backend(step: Step, **options: Any) -> Any:
    return jit(step, backend="eager", **options)


def add(state: Any, batch: Any) -> Any:
    """Adds the batch to the state; reports both."""
    total = state["total"] + batch["x"].sum() * batch.get("times", 1)
    return {**state, "total": total}, {"total": total, "name": "sum", "nothing": None}


def start() -> dict[str, Any]:
    return {"total": torch.zeros(()), "rest": [torch.ones(2, 2), None]}


X = {"x": torch.ones(2)}


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


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (lambda s: s.update(total=torch.zeros((), dtype=torch.int32)), r"at \['total'\] it has a torch.int32"),
    "shape": (lambda s: s.update(rest=[torch.ones(2), None]), r"at \['rest'\]\[0\] it has .* shape \(2,\)"),
    "no leaf": (lambda s: s.pop("total"), "they part at leaf 0"),
    "another name": (lambda s: s.update(x=s.pop("total")), "they part at leaf 0"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_state_changed_in_place_is_checked_and_a_refused_call_loses_nothing(change: str) -> None:
    run, act, message = eager_backend(add), *REFUSED[change]
    state, _ = run(start(), X)
    other = clone(state)
    act(state)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            run(state, X)
    assert run(other, X)[0]["total"] == 4


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


def test_without_a_compiler_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler on a CPU.*install it"):
        jit(add)(start(), X)


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


@pytest.mark.parametrize(("donate", "unroll", "compile_after"), [(True, None, 2), (False, 2, 2), (True, None, 0)])
def test_a_further_signature_is_compiled_when_it_has_come_often(
    backends: list[str], caplog: pytest.LogCaptureFixture, donate: bool, unroll: int | None, compile_after: int
) -> None:
    run = jit(add, backend="inductor", compile_after=compile_after, donate=donate, unroll=unroll)
    state: Any = {"total": torch.zeros(())}
    expected, lead = 0.0, () if unroll is None else (unroll,)
    caplog.set_level("INFO", "funcamp")
    for size in (4, 4, 3, 3, 3, 3, 4, 5):
        state, metrics = run(state, {"x": torch.ones(*lead, size)})
        expected += (unroll or 1) * size
        assert state["total"] == expected == metrics["total"].flatten()[-1]
    assert backends == (["inductor", "eager", "inductor", "eager"] if compile_after else ["inductor"] * 3)
    assert caplog.text.count("for its first 2 calls; it is compiled at the next one") == bool(compile_after) * 2
    assert run.programs == 3
