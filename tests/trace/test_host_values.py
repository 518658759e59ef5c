"""What a step for another device has on the host. Here that device is `meta`: a real one is in tests/cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from funcamp._trace import trace as trace_module
from funcamp._trace.host_values import compute_host_values
from funcamp._trace.trace import Graph, trace
from funcamp._trace.tracing import HostError

META = torch.device("meta")
ON_HOST = torch.tensor([3.0, 4.0])
ARRAY = np.array([1.0, 2.0], dtype=np.float32)


def written(x: Tensor) -> Tensor:
    factors = torch.tensor([1.0, 1.0])
    first = factors.to(x.device, copy=True)  # on a CPU it would be the same tensor
    factors[0] = 0.5
    factors[1:].mul_(3)
    return x * first + factors.to(x.device)


#: With what each returns for [1, 3].
CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "cast and moved": (lambda x: x * torch.tensor([1, 2]).float().to(x.device), [1, 6]),
    "an index": (lambda x: x[torch.tensor([1, 0])], [3, 1]),
    "a scalar": (lambda x: x * torch.tensor(2.0), [2, 6]),
    "copied": (lambda x: torch.empty_like(x).copy_(torch.tensor([5.0, 6.0])) + x, [6, 9]),
    "written in between": (written, [1.5, 6]),
    "parts": (lambda x: x * torch.tensor([[1.0], [2.0]]).unbind()[1].to(x.device), [2, 6]),
    "a choice": (lambda x: torch.where(x > 1, x, torch.tensor(0.5)), [0.5, 3]),
    "in derivatives": (torch.func.vmap(torch.func.grad(lambda v: (v * torch.tensor(2.0)).square())), [8, 24]),
    "an array": (lambda x: x * torch.from_numpy(ARRAY).to(x.device), [1, 6]),
}


def traced(change: Callable[[Tensor], Any], *, in_cuda_graph: bool = True) -> Graph:
    def step(values: list[Tensor]) -> Any:
        return [], change(values[0])

    return trace(step, [torch.ones(2, device=META)], {"meta"}, in_cuda_graph=in_cuda_graph)


def places(graph: Graph) -> set[str]:
    """The types of device of all tensors that the operations read and return."""
    return {node.meta["val"].device.type for node in graph.module.graph.nodes if "val" in node.meta}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_has_the_value_of_eager_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for a device without values, computed on the CPU, where its constants are for that."""
    change, expected = CONSTANTS[name]
    x = torch.tensor([1.0, 3.0])
    assert change(x).tolist() == expected
    assert places(traced(change)) == {"meta"}

    def on_cpu(module: Any, _: torch.device, mode: Any) -> None:
        compute_host_values(module, x.device, mode)

    monkeypatch.setattr(trace_module, "compute_host_values", on_cpu)
    graph = traced(change)
    assert not graph.captured
    for node in graph.module.graph.nodes:
        node.kwargs = {**node.kwargs, "device": x.device} if "device" in node.kwargs else node.kwargs
    graph.module.recompile()
    assert graph.module(x)[0].tolist() == expected


def test_a_graph_for_the_host_itself_computes_in_each_call() -> None:
    x = torch.tensor([1.0, 3.0])
    graph = trace(lambda values: ([], into_the_host(values[0])), [x], {"cpu"}, in_cuda_graph=True)
    graph.module.recompile()
    assert graph.module(x)[0].tolist() == [1, 0]


def test_a_result_on_the_host_stays_there() -> None:
    graph = traced(lambda x: [torch.tensor(0.25), torch.zeros(2), x + 1])
    assert not graph.captured
    results: Any = graph.module.graph.output_node().args[0]
    assert [result.meta["val"].device.type for result in results] == ["cpu", "cpu", "meta"]


def into_the_host(x: Tensor) -> Tensor:
    found = torch.zeros(2)
    found[0] = x[0]
    return found


CHANGING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "captured": (lambda x: x * ON_HOST.to(META), r"reads a torch.float32 tensor of shape \(2,\) on cpu: move it"),
    "drawn": (lambda x: x * torch.rand(()), "draws on cpu: pass device="),
    "written": (into_the_host, "stay on one type of device"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_could_change_on_the_host_is_refused_in_a_cuda_graph(name: str) -> None:
    change, text = CHANGING[name]
    with pytest.raises(HostError, match=text):
        traced(change)


@pytest.mark.parametrize("name", ["captured", "drawn"])
def test_without_a_graph_the_host_computes_in_each_call(name: str) -> None:
    assert "cpu" in places(traced(CHANGING[name][0], in_cuda_graph=False))
