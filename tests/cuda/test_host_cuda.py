"""On a GPU: what a captured step has on the host. Constants are moved; what could change is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import clone, jit
from tests.support.helpers import assert_same

pytestmark = pytest.mark.cuda

ON_HOST = torch.tensor([3.0, 4.0])
SCALAR_ON_HOST = torch.tensor(3.0)

CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "moved": lambda x: x * torch.tensor([1.0, 2.0]).to(x.device),
    "made there": lambda x: x * torch.tensor([1.0, 2.0], device=x.device),
    "a scalar": lambda x: x * torch.tensor(2.0),
    "an index of a tensor": lambda x: x[torch.tensor([1, 0])],
    "written": lambda x: torch.zeros(2, device=x.device).index_copy_(0, torch.tensor([1, 0]).cuda(), x),
    "computed on the host": lambda x: x * (torch.arange(2.0) * 2 + 1).cuda(),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_of_the_host_has_its_value(name: str) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] * 0.5 + CONSTANTS[name](batch)}, batch.mean()

    state: Any = {"x": torch.ones(2, device="cuda")}
    expected, run, actual = clone(state), jit(step), state
    for index in range(3):
        batch = torch.tensor([1.0, 3.0], device="cuda") + index
        expected, metrics = step(expected, batch)
        actual, found = run(actual, batch)
        assert_same((actual, found), (expected, metrics))


def test_metrics_of_the_host_are_returned() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        metrics = batch.mean(), batch.sum(), torch.tensor(0.25), torch.zeros(()), torch.tensor(3)
        return {"x": state["x"] + batch.sum()}, metrics

    run, state = jit(step), {"x": torch.zeros((), device="cuda")}
    for index in range(3):
        state, metrics = run(state, torch.full((2,), float(index), device="cuda"))
        assert [metric.item() for metric in metrics] == [index, 2 * index, 0.25, 0.0, 3]
        assert [metric.device.type for metric in metrics] == ["cuda", "cuda", "cpu", "cpu", "cpu"]


CHANGING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a scalar": (lambda x: x * SCALAR_ON_HOST, r"reads a torch.float32 tensor of shape \(\) on cpu"),
    "moved": (lambda x: x * ON_HOST.to(x.device), r"reads a torch.float32 tensor of shape \(2,\) on cpu"),
    "drawn and moved": (lambda x: x * torch.rand(2).cuda(), "draws on cpu"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_could_change_on_the_host_is_refused_in_a_capture(name: str) -> None:
    change, text = CHANGING[name]

    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + change(batch)}, batch.mean()

    state = {"x": torch.zeros(2, device="cuda")}
    with pytest.raises(RuntimeError, match=f"jit: step must .*test_host_cuda.py.*{text}"):
        jit(step)(state, torch.ones(2, device="cuda"))
    assert state["x"].tolist() == [0.0, 0.0]
