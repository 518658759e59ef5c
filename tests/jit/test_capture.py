"""The logic around a CUDA graph, with a stand-in for the graph: static storage, warm-up, replay, failure."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from funcamp import MetricReader, ScalerConfig, _upstream, clone, jit, stateless
from funcamp._io import metric_reader
from funcamp._jit import cuda_graph
from tests.support.helpers import assert_same
from tests.support.models import mlp
from tests.support.stand_in import FakeCuda, StandIn
from tests.support.steps import build


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: stand_in)
    return stand_in


CONFIG = ScalerConfig(2.0**24, growth_interval=5)


def task_and_step(**options: Any) -> Any:
    task = mlp(**options)
    adamw = stateless(torch.optim.AdamW, lr=1e-2)
    return task, build(task, adamw, policy="float16", max_norm=1.0, config=CONFIG)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("donate", [True, False])
def test_replays_are_the_eager_steps(graphs: StandIn, donate: bool) -> None:
    task, step = task_and_step()
    run, state, expected = jit(step, backend="aot_eager", donate=donate), step.init(), step.init()
    rows = []
    for index in range(12):
        expected, metrics = step(expected, task.batch(index))
        state, found = run(state, task.batch(index))
        rows.append((found, metrics))
        assert_same(state, expected)
    assert_same([found for found, _ in rows], [metrics for _, metrics in rows])  # none overwritten by a later replay
    assert graphs.captures == 1
    assert graphs.warm_ups == 3


def test_dropout_does_not_depend_on_the_warm_up(graphs: StandIn) -> None:
    task, step = task_and_step(dropout=0.5)
    torch.manual_seed(1)
    expected = step.init()
    for index in range(3):
        expected, _ = step(expected, task.batch(index))
    torch.manual_seed(1)
    run, state = jit(step, backend="aot_eager"), step.init()
    for index in range(3):
        state, _ = run(state, task.batch(index))
    assert_same(state, expected)


def numbers(*tensors: Tensor) -> list[float]:
    return [tensor.item() for tensor in tensors]


def add(state: Any, batch: Tensor) -> Any:
    return {"x": state["x"] + batch.sum(), "n": state["n"] + 1}, {
        "sum": batch.sum(),
        "mean": batch.mean(),
        "all": batch,
    }


def test_another_shape_is_another_graph_on_the_same_state(graphs: StandIn) -> None:
    run, state = jit(add, backend="aot_eager"), {"x": torch.zeros(()), "n": torch.tensor(0)}
    for size in (2, 3, 2, 3, 3):
        state, metrics = run(state, torch.ones(size))
        assert metrics["sum"] == size
        assert metrics["all"].shape == (size,)
    assert numbers(state["x"], state["n"]) == [13, 5]
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


def test_batches_and_a_lone_metric_are_left_alone(graphs: StandIn) -> None:
    def mean(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + batch.sum()}, batch.mean()

    run, state = jit(mean, backend="aot_eager"), {"x": torch.zeros(())}
    batches = [torch.full((2,), float(index)) for index in range(3)]
    means = []
    for batch in batches:
        state, metric = run(state, batch)
        means.append(metric)
    assert [batch.tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert numbers(*means) == [0, 1, 2]


def test_a_state_made_of_views_of_the_last_one_is_copied_before_it_is_written(graphs: StandIn) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {name: leaf + batch for name, leaf in state.items()}, None

    run = jit(step, backend="aot_eager")
    state, _ = run({"a": torch.zeros(2, 2), "b": torch.arange(4.0).view(2, 2)}, torch.ones(()))
    before = clone(state)
    state, _ = run({"a": state["b"].detach(), "b": state["b"].t()}, torch.ones(()))
    assert_same(state, {"a": before["b"] + 1, "b": before["b"].t().contiguous() + 1})


def test_a_tensor_the_step_reads_is_no_static_storage(graphs: StandIn) -> None:
    anchor = torch.tensor([1.0, 2.0])

    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + batch}, (state["w"] - anchor).sum()

    run = jit(step, backend="aot_eager")
    state: Any = {"w": anchor.detach()}
    moved = []
    for _ in range(3):
        state, metric = run(state, torch.ones(()))
        moved.append(metric.item())
    assert moved == [0, 2, 4]
    assert anchor.tolist() == [1, 2]


def test_batches_with_grad_and_inference_mode_leave_no_trace(graphs: StandIn) -> None:
    run, state = jit(add, backend="aot_eager"), {"x": torch.zeros(()), "n": torch.tensor(0)}
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        state, _ = run(state, weight.detach())
    for _ in range(3):
        state, metrics = run(state, weight * 1)
        assert not metrics["all"].requires_grad
    assert numbers(state["x"], state["n"]) == [12, 4]


def test_steps_in_one_graph(graphs: StandIn) -> None:
    run, state = jit(add, backend="aot_eager", unroll=3), {"x": torch.zeros(()), "n": torch.tensor(0)}
    for _ in range(2):
        state, metrics = run(state, torch.arange(6.0).view(3, 2))
        assert metrics["sum"].tolist() == [1, 5, 9]
    assert numbers(state["x"], state["n"]) == [30, 6]
    assert graphs.captures == 1


def test_a_capture_that_fails_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "graphs_for", lambda device: StandIn(fails=True))
    run, state = jit(add, backend="aot_eager"), {"x": torch.zeros(()), "n": torch.tensor(0)}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"jit: the step could not be captured .*: operation not.*capture=False"):
            run(state, torch.ones(2))
    assert numbers(state["x"], state["n"]) == [0, 0]


@pytest.mark.parametrize("fails", ["in an operation", "at the end", "in Python"])
def test_a_capture_that_fails_leaves_stream_pool_and_generator_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    cuda, second = FakeCuda(monkeypatch), torch.device("meta", 1)
    graphs, streams = cuda_graph.CudaGraphs(second), []

    def run() -> list[Tensor]:
        streams.append(cuda.stream)
        if fails == "in an operation":
            cuda.synchronize()
        if fails == "in Python":
            raise RuntimeError("a bug")
        cuda.legal = fails != "at the end"
        return []

    cause = {"in an operation": "not permitted when", "at the end": "a previous error", "in Python": "a bug"}[fails]
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


class Late:
    """An event that has not happened until it is waited for, or released."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_scalar_metrics_are_returned_by_one_copy_for_each_dtype(
    graphs: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        new = state["x"] + batch
        metrics = {
            "sums": [new.sum(), batch.sum(), new.max()],
            "counts": (state["n"] + 1, (batch > 0).sum()),
            "flag": new.isfinite().all(),
            "half": new.sum().half(),
            "whole": new * 2,
            "same": batch.sum(),
            "none": None,
            "name": "a",
        }
        return {"x": new, "n": state["n"] + 1}, metrics

    copied: list[torch.dtype] = []

    def copy_each(copies: list[Tensor], results: list[Tensor], **options: Any) -> None:
        copied.append(results[0].dtype)
        torch._foreach_copy_(copies, results, **options)

    run = jit(step, backend="eager")
    state: Any = {"x": torch.zeros(3), "n": torch.tensor(0)}
    expected, kept = clone(state), []
    for index in range(3):
        batch = torch.randn(3) + index
        state, metrics = run(state, batch)
        expected, expected_metrics = step(expected, batch)
        kept.append((metrics, expected_metrics))
    assert_same(state, expected)
    for metrics, expected_metrics in kept:  # later calls have changed none
        assert list(metrics) == list(expected_metrics)
        assert metrics["name"] == "a"
        assert_same(metrics, expected_metrics)
    monkeypatch.setattr(_upstream, "copy_each", copy_each)
    run(state, torch.ones(3))
    assert copied[1:] == [torch.float32, torch.int64, torch.bool, torch.float16]  # the first is the batch


def test_metrics_arrive_late_in_order_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Late] = []

    def recorded(_: object) -> Late:
        events.append(Late())
        return events[-1]

    monkeypatch.setattr(metric_reader, "_record_event", recorded)
    monkeypatch.setattr(metric_reader, "_on_device", lambda leaf: True)
    reader = MetricReader(limit=4)
    for index in range(3):
        reader.put({"loss": torch.tensor(float(index)), "row": torch.ones(2) * index, "name": "a"})
    assert reader.ready() == []
    events[1].done = True
    assert reader.ready() == []  # the first has not arrived
    events[0].done = True
    assert [row["loss"] for row in reader.ready()] == [0.0, 1.0]
    for index in range(3, 8):
        reader.put({"loss": torch.tensor(float(index))})
    assert len(reader) == 6
    assert [row["loss"] for row in reader.drain()] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert len(reader) == 0
    assert reader.drain() == []


def test_metrics_of_two_devices_arrive_when_both_copies_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Tensor):
        device = torch.device("cuda:1")

    events: dict[torch.device, Late] = {}
    monkeypatch.setattr(metric_reader, "_record_event", lambda device: events.setdefault(device, Late()))
    monkeypatch.setattr(metric_reader, "_on_device", lambda leaf: True)
    reader = MetricReader()
    for number in (1.0, 2.0):
        reader.put({"first": torch.tensor(number), "second": torch.tensor(number).as_subclass(Second), "other": None})
    assert events.keys() == {torch.device("cpu"), torch.device("cuda:1")}
    for event in events.values():
        assert reader.ready() == []
        event.done = True
    assert [row["second"] for row in reader.ready()] == [1.0, 2.0]
    for event in events.values():
        event.done = False
    reader.put({"first": torch.tensor(3.0), "second": torch.tensor(3.0).as_subclass(Second)})
    assert [row["first"] for row in reader.drain()] == [3.0]
    assert all(event.done for event in events.values())


def test_metrics_on_a_cpu_arrive_at_once() -> None:
    reader = MetricReader()
    reader.put((torch.tensor(2), torch.tensor(True), None, torch.ones(2)))
    ((count, flag, nothing, row),) = reader.ready()
    assert (count, flag, nothing) == (2, True, None)
    assert_same(row, torch.ones(2))
    scale = torch.tensor(2.0)
    reader.put(scale)
    scale.mul_(2)  # as a donated step writes its state
    assert reader.ready() == [2.0]
    for limit, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="MetricReader: limit must be"):
            MetricReader(limit=limit)  # type: ignore[arg-type]


def test_a_state_on_two_gpus_is_not_captured() -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    assert cuda_graph.graphs_for([]) is None
    assert cuda_graph.graphs_for([cpu, cpu]) is None
    for places in ([first, second], [first, first, cpu]):
        with pytest.raises(RuntimeError, match=r"on one device to be captured; got cuda:0, .*: pass capture=False"):
            cuda_graph.graphs_for(places)


class Forgetful:
    """Captures as torch does: the graph refers to memory, and keeps no tensor."""

    def warm_up(self, run: Any, times: int) -> None: ...

    def capture(self, run: Any) -> Any:
        return (lambda: None), run()


class Program:
    """What a compiler returns."""

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        return [values[0] + values[1]]


def test_a_graph_keeps_the_program_that_has_its_constants() -> None:
    program, graphs = Program(), cast("cuda_graph.CudaGraphs", Forgetful())
    alive = weakref.ref(program)
    captured = cuda_graph.Captured(graphs, program, [torch.zeros(2)], [torch.ones(2)])
    del program
    gc.collect()
    assert alive() is not None
    assert captured([torch.zeros(2), torch.ones(2)])
