"""What a step for another device has on the host. Here that device is `meta`: a real one is in tests/cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from funcamp._trace.host_constants import _Host
from funcamp._trace.trace import Graph, trace
from funcamp._trace.tracing import HostError

META = torch.device("meta")
ON_HOST = torch.tensor([3.0, 4.0])


def written(x: Tensor) -> Tensor:
    factors = torch.tensor([1.0, 1.0])
    first = factors.to(x.device, copy=True)  # on a CPU it would be the same tensor
    factors[0] = 0.5
    factors[1:].mul_(3)
    return x * first + factors.to(x.device)


def written_index(x: Tensor) -> Tensor:
    index = torch.tensor([0, 1])
    index[0] = 1
    return x[index]


#: With what each returns for [1, 3].
CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "moved": (lambda x: x * torch.tensor([1.0, 2.0]).to(x.device), [1, 6]),
    "cast and moved": (lambda x: x * torch.tensor([1, 2]).float().to(x.device), [1, 6]),
    "an index": (lambda x: x[torch.tensor([1, 0])], [3, 1]),
    "copied": (lambda x: torch.empty_like(x).copy_(torch.tensor([5.0, 6.0])) + x, [6, 9]),
    "written in between": (written, [1.5, 6]),
    "an index that was written": (written_index, [3, 3]),
    "parts": (lambda x: x * torch.tensor([[1.0], [2.0]]).unbind()[1].to(x.device), [2, 6]),
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
    """A graph for a device without values, computed on the CPU, where its constants stay for that."""
    change, expected = CONSTANTS[name]
    x = torch.tensor([1.0, 3.0])
    assert change(x).tolist() == expected
    assert places(traced(change)) == {"meta"}
    monkeypatch.setattr(_Host, "_device_of", lambda *_: x.device)
    graph = traced(change)
    assert not graph.captured
    for node in graph.module.graph.nodes:
        node.kwargs = {**node.kwargs, "device": x.device} if "device" in node.kwargs else node.kwargs
    graph.module.recompile()
    assert graph.module(x)[0].tolist() == expected


ARRAY = np.array([1.0, 2.0], dtype=np.float32)
CHANGING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "captured": (lambda x: x * ON_HOST.to(META), r"reads a torch.float32 tensor of shape \(2,\) on cpu: move it"),
    "an array": (lambda x: x * torch.from_numpy(ARRAY).to(META), "read no array of numpy, .*on the device before the"),
    "drawn": (lambda x: x * torch.rand(()), "draws on cpu: pass device="),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_could_change_on_the_host_is_refused_in_a_cuda_graph_alone(name: str) -> None:
    change, text = CHANGING[name]
    with pytest.raises(HostError, match=text):
        traced(change)
    assert "cpu" in places(traced(change, in_cuda_graph=False))
