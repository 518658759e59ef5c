"""The logic around a CUDA graph, with a stand-in for the graph: static storage, warm-up, replay, failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import ScalerConfig, _upstream, jit, stateless
from funcamp._jit import cuda_graph
from tests.support.models import mlp
from tests.support.stand_in import FakeCuda, StandIn
from tests.support.steps import assert_as_eager, build


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.take_place(monkeypatch)
    return stand_in


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("donate", [True, False])
def test_replays_are_the_eager_steps_and_dropout_does_not_depend_on_the_warm_up(graphs: StandIn, donate: bool) -> None:
    task, adamw, config = (
        mlp(dropout=0.5),
        stateless(torch.optim.AdamW, lr=1e-2),
        ScalerConfig(2.0**24, growth_interval=5),
    )
    step = build(task, adamw, policy="float16", max_norm=1.0, config=config)
    run = jit(step, backend="aot_eager", donate=donate)
    rows = assert_as_eager(step, run, step.init(), map(task.batch, range(12)))
    assert {row.found_inf.item() for row in rows} == {0.0, 1.0}
    assert graphs.captures == 1
    assert graphs.warm_ups == 3


def numbers(*tensors: Tensor) -> list[float]:
    return [tensor.item() for tensor in tensors]


def add(state: Any, batch: Tensor) -> Any:
    return {"x": state["x"] + batch.sum(), "n": state["n"] + 1}, {
        "sums": (batch.sum(), state["x"].sum().half()),
        "counts": [(batch > 0).sum(), state["n"] + 1, batch.isfinite().all()],
        "all": batch,
        "name": "add",
    }


def test_another_shape_is_another_graph_on_the_same_state(graphs: StandIn) -> None:
    start = {"x": torch.zeros(()), "n": torch.tensor(0)}
    rows = assert_as_eager(add, jit(add, backend="aot_eager"), start, map(torch.ones, (2, 3, 2, 3, 3)))
    assert list(rows[0]) == ["sums", "counts", "all", "name"]
    assert graphs.captures == 2


def test_a_state_from_elsewhere_is_copied_in_and_the_former_keeps_its_values(graphs: StandIn) -> None:
    run, first = jit(add, backend="aot_eager"), {"x": torch.zeros(()), "n": torch.tensor(0)}
    first, _ = run(first, torch.ones(2))
    leaf = first["x"]
    other: Any = {"x": torch.tensor(100.0), "n": torch.tensor(7)}
    second, _ = run(other, torch.ones(2))
    assert numbers(second["x"], second["n"], other["x"]) == [102, 8, 100]
    assert numbers(first["x"], leaf, first["n"]) == [2, 2, 1]
    first, _ = run(first, torch.ones(2))  # back again
    assert numbers(first["x"], first["n"], second["x"], second["n"]) == [4, 2, 102, 8]
    first["x"] = torch.tensor(50.0)
    first, _ = run(first, torch.ones(2))
    assert numbers(first["x"], first["n"]) == [52, 3]
    assert graphs.captures == 1


def test_two_steps_that_are_captured_apart_never_read_each_others_states(graphs: StandIn) -> None:
    run, another = jit(add, backend="aot_eager"), jit(add, backend="aot_eager")
    first, _ = run({"x": torch.zeros(()), "n": torch.tensor(0)}, torch.ones(2))
    second, _ = another(first, torch.ones(2))
    third, _ = run({"x": torch.tensor(100.0), "n": torch.tensor(7)}, torch.ones(2))
    fourth, _ = another(second, torch.ones(2))
    assert numbers(third["x"], fourth["x"]) == [102, 6]
    fifth, _ = run(fourth, torch.ones(2))
    assert numbers(fourth["x"], fifth["x"]) == [6, 8]


def test_tokens_in_uint16_are_copied_one_by_one_because_torch_has_no_other_kernel(
    graphs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_together = _upstream._copy_together

    def as_on_a_gpu(targets: list[Tensor], sources: list[Tensor], **options: Any) -> None:
        assert torch.uint16 not in {target.dtype for target in targets}
        copy_together(targets, sources, **options)

    def count(state: Any, tokens: Tensor) -> Any:
        return {"sum": state["sum"] + tokens.long().sum()}, tokens

    monkeypatch.setattr(_upstream, "_copy_together", as_on_a_gpu)
    batches = [torch.full((3,), number, dtype=torch.uint16) for number in range(3)]
    assert_as_eager(count, jit(count, backend="aot_eager"), {"sum": torch.tensor(0)}, batches)
    assert graphs.captures == 1


def test_a_capture_that_fails_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(fails=True).take_place(monkeypatch)
    run, state = jit(add, backend="aot_eager"), {"x": torch.zeros(()), "n": torch.tensor(0)}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"jit: the step could not be captured .*: operation not.*capture=False"):
            run(state, torch.ones(2))
    assert numbers(state["x"], state["n"]) == [0, 0]


@pytest.mark.parametrize("fails", ["in an operation", "at the end"])
def test_a_capture_that_fails_leaves_stream_pool_and_generator_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    cuda, second = FakeCuda(monkeypatch), torch.device("meta", 1)
    graphs, streams = cuda_graph.CudaGraphs(second), []

    def run() -> list[Tensor]:
        streams.append(cuda.stream)
        if fails == "in an operation":
            cuda.synchronize()
        cuda.legal = fails != "at the end"
        return []

    cause = {"in an operation": "not permitted when", "at the end": "a previous error"}[fails]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=cause):
            graphs.capture(run)
        assert (cuda.stream, cuda.recording, cuda.drawing) == ("default", [], True)
    fails = ""
    replay, outputs = graphs.capture(run)
    replay()
    assert (outputs, cuda.recording, cuda.drawing) == ([], [], True)
    assert {stream.device for stream in streams} == {second}  # of the state's device, not torch.cuda.graph's
    assert len({id(stream) for stream in streams}) == 1  # graphs share memory on one stream alone


def test_a_state_on_two_gpus_is_not_captured() -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    assert cuda_graph.graphs_for([]) is None
    assert cuda_graph.graphs_for([cpu, cpu]) is None
    for places in ([first, second], [first, first, cpu]):
        with pytest.raises(RuntimeError, match=r"on one device to be captured; got cuda:0, .*: pass capture=False"):
            cuda_graph.graphs_for(places)
