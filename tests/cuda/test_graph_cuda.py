"""On a GPU: what the graph of a captured step consists of, and that replaying it takes no memory."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from funcamp import ScalerConfig, jit, stateless
from tests.support.models import Task, cnn, mlp, on_gpu, tied
from tests.support.steps import build

pytestmark = pytest.mark.cuda

WARM_UP, REPLAYS = 1000, 100_000
TASKS: dict[str, Callable[[], Task]] = {"mlp": lambda: mlp(dropout=0.5), "cnn": cnn, "gpt": tied}


def kinds_of(graph: Any) -> Counter[str]:
    """How many nodes of each type a graph has that was kept; of a copy also from where and to where."""
    from cuda.bindings import runtime  # torch's CUDA builds depend on it

    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(raw)
    error, nodes, found = runtime.cudaGraphGetNodes(raw, count)
    assert (error, found) == (runtime.cudaError_t.cudaSuccess, count)
    kinds = []
    for node in nodes:
        kind = runtime.cudaGraphNodeGetType(node)[1].name.removeprefix("cudaGraphNodeType")
        if kind == "Memcpy":
            kind = runtime.cudaMemcpyKind(int(runtime.cudaGraphMemcpyNodeGetParams(node)[1].kind)).name
        kinds.append(kind)
    return Counter(kinds)


@pytest.mark.parametrize("name", TASKS)
def test_a_step_is_one_graph_of_kernels_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    plain: Any = torch.cuda.CUDAGraph

    def kept() -> Any:
        graphs.append(plain(keep_graph=True))
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", kept)
    task = on_gpu(TASKS[name]())
    adamw, config = stateless(torch.optim.AdamW, lr=1e-2), ScalerConfig(init_scale=2.0**24)
    step = build(task, adamw, config=config, policy="float16", max_norm=1.0, ema_decay=0.9)
    run, state = jit(step), step.init()
    for index in range(2):
        state, metrics = run(state, task.batch(index))
    assert len(graphs) == 1
    kinds = kinds_of(graphs[0])
    assert kinds["Kernel"] >= 10, kinds
    # A library may clear its workspace, and the attention of cuDNN copies within the device.
    allowed = {"Kernel", "Memset"} | ({"cudaMemcpyDeviceToDevice"} if name == "gpt" else set())
    assert {*kinds} <= allowed, kinds
    assert metrics.found_inf.item() == 1.0


def resident() -> int:
    """Bytes of this process in the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_replays_take_no_memory() -> None:
    task = on_gpu(mlp()._replace(model=torch.nn.Linear(8, 4)))
    step = build(task, stateless(torch.optim.SGD, lr=1e-3), policy="float16")
    run, state, batch = jit(step), step.init(), task.batch(0)

    def replay(times: int) -> Any:
        nonlocal state
        for _ in range(times):
            state, metrics = run(state, batch)
        torch.cuda.synchronize()
        return metrics

    metrics = replay(WARM_UP)
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved, host = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident()
    metrics = replay(REPLAYS)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)
    assert torch.cuda.max_memory_allocated() <= allocated + 2**16  # a call's metrics
    assert resident() <= host + 100 * REPLAYS
    assert metrics.applied + metrics.skipped == WARM_UP + REPLAYS
