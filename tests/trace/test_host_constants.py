"""What a step for another device has on the host. Here that device is `meta`: a real one is in tests/cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp._trace.trace import Graph, trace
from funcamp._trace.tracing import HostError

META = torch.device("meta")
ON_HOST = torch.tensor([3.0, 4.0])

CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "moved": lambda x: x * torch.tensor([1.0, 2.0]).to(META),
    "moved and cast": lambda x: x * torch.tensor([1, 2]).to(META, torch.float32),
    "an index of a tensor": lambda x: x[torch.tensor([1, 0])],
    "written at an index": lambda x: torch.zeros_like(x).index_put((torch.tensor([1, 0]),), x),
}


def traced(change: Callable[[Tensor], Any], *, in_cuda_graph: bool = True) -> Graph:
    def step(values: list[Tensor]) -> Any:
        return [], change(values[0])

    return trace(step, [torch.ones(2, device=META)], {"meta"}, in_cuda_graph=in_cuda_graph)


def places(graph: Graph) -> set[str]:
    """The types of device of all tensors that the operations read and return."""
    return {node.meta["val"].device.type for node in graph.module.graph.nodes if "val" in node.meta}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_of_the_host_is_moved(name: str) -> None:
    graph = traced(CONSTANTS[name])
    assert places(graph) == {"meta"}
    assert not graph.captured
    graph.module.recompile()
    (result,) = graph.module(torch.ones(2, device=META))
    assert result.device == META


def test_constant_that_is_computed_with_on_the_host_stays_there() -> None:
    graph = traced(lambda x: x * (torch.tensor(2.0) + 1))
    assert places(graph) == {"meta", "cpu"}


CHANGING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "captured": (lambda x: x * ON_HOST.to(META), r"reads a torch.float32 tensor of shape \(2,\) on cpu: move it"),
    "captured scalar": (lambda x: x * ON_HOST[0], r"reads a torch.float32 tensor of shape \(2,\) on cpu: move it"),
    "drawn": (lambda x: x * torch.rand(()), "draws on cpu: pass device="),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_could_change_on_the_host_is_refused_in_a_cuda_graph_alone(name: str) -> None:
    change, text = CHANGING[name]
    with pytest.raises(HostError, match=f"test_host_constants.py.*{text}"):
        traced(change)
    assert "cpu" in places(traced(change, in_cuda_graph=False))
