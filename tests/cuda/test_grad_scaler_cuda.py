"""On a GPU: GradScaler against torch's, without a sync, captured into one graph, eager and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import GradScaler
from tests.support.helpers import assert_close, assert_no_sync, assert_same

# torch's advice for optimizers that are never captured.
ADVICE = "ignore:This instance was constructed with capturable=True"
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings(ADVICE)]

STEPS = 24
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "SGD momentum fused": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "AdamW capturable": (torch.optim.AdamW, {"lr": 0.01, "capturable": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True, "capturable": True}),
    "NAdam capturable": (torch.optim.NAdam, {"lr": 0.01, "capturable": True}),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The first two overflow, and a later one; others do once the scale has grown."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
    return x.cuda(), y.cuda() * (1e4 if step in (0, 1, 11) else 1.0)


class Loop:
    """A model, an optimizer and a scaler."""

    def __init__(self, scaler: Any, name: str, clip: bool = False) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
        self.model = torch.nn.Sequential(*layers).cuda()
        cls, arguments = OPTIMIZERS[name]
        self.optimizer = cls(self.model.parameters(), **arguments)
        self.scaler, self.clip = scaler, clip

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.zero_grad()
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            loss = torch.nn.functional.mse_loss(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


def make(cls: Any, **options: Any) -> Any:
    return cls("cuda", init_scale=2.0**14, growth_interval=3, **options)


def first_skips(name: str) -> int:
    # torch leaves uninitialized memory in a fused momentum whose first step is skipped
    return 2 if name == "SGD momentum fused" else 0


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loop_follows_torch_without_a_sync(name: str, clip: bool) -> None:
    ours, theirs = Loop(make(GradScaler), name, clip), Loop(make(torch.amp.GradScaler), name, clip)
    scales = []
    for step in range(first_skips(name), STEPS):
        x, y = batch(step)
        theirs.step(x, y)
        # the first calls load kernels and set up cuBLAS
        with assert_no_sync() if step > 3 else contextlib.nullcontext():
            ours.step(x, y)
        assert ours.scaler.state_dict() == theirs.scaler.state_dict()
        assert_same(ours.params(), theirs.params())
        scales.append(ours.scaler.get_scale())
    assert len(set(scales)) > 2


def captured(loop: Loop, run: Callable[[Tensor, Tensor], Tensor], warm_up: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The whole iteration in one CUDA graph, after some eager ones on the first batches."""
    x, y = (leaf.clone() for leaf in batch(0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(warm_up):
            for static, value in zip((x, y), batch(step)):
                static.copy_(value)
            loop.model.zero_grad()
            run(x, y)
    torch.cuda.current_stream().wait_stream(stream)
    loop.model.zero_grad()  # as before every warm-up: gradients where there were none would be compiled for anew
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run(x, y)

    def replay(new_x: Tensor, new_y: Tensor) -> Tensor:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss.clone()

    return replay


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_loop_in_one_graph_follows_torch(name: str, clip: bool) -> None:
    ours, theirs = Loop(make(GradScaler), name, clip), Loop(make(torch.amp.GradScaler), name, clip)
    if first_skips(name):
        for loop in (ours, theirs):
            loop.step(*batch(5))
    replay = captured(ours, ours.step, warm_up=4)
    for step in range(4):
        theirs.step(*batch(step))
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    for step in range(4, STEPS):
        x, y = batch(step)
        before = theirs.scaler.get_scale()
        with assert_no_sync():
            replay(x, y)
        theirs.step(x, y)
        skipped = theirs.scaler.get_scale() < before
        assert skipped or step != 11
        assert ours.scaler.metrics().found_inf.item() == float(skipped)
        assert ours.scaler.state_dict() == theirs.scaler.state_dict()
        assert_close(ours.params(), theirs.params(), 1e-5)


def test_counters_on_the_host_are_read_for_with_a_warning_and_refused_in_a_capture() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scaler = make(GradScaler)
    scaler.scale(torch.zeros((), device="cuda"))
    weight.grad = torch.full((4,), torch.inf, device="cuda")
    with pytest.warns(UserWarning, match="Adam keeps tensors on the host"):
        scaler.step(optimizer)
    scaler.update()
    assert_same(weight.detach(), torch.ones(4, device="cuda"))
    assert not any(state["step"] for state in optimizer.state.values())
    weight.grad = torch.ones(4, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        weight.detach().add_(1)  # a graph of nothing is a warning
        with pytest.raises(RuntimeError, match="capturable=True"):
            scaler.step(optimizer)
    torch.cuda.synchronize()


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_a_flag_reaches_parameters_on_the_host_before_it_is_read(first: str) -> None:
    """Two devices in one optimizer; the flag of the GPU is late, behind much work."""
    second = "cuda" if first == "cpu" else "cpu"
    params = [torch.nn.Parameter(torch.ones(2, device=device)) for device in (first, second)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = GradScaler("cuda", init_scale=2.0, skip="select")
    busy = torch.ones(4096, 4096, device="cuda")
    for value in (float("inf"), 2.0):
        for param in params:
            infinite_on_gpu = value if param.device.type == "cuda" else 2.0
            param.grad = torch.full((2,), infinite_on_gpu, device=param.device)
        for _ in range(20):
            busy = busy @ busy * 1e-4
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
        expected = 1.0 if value == float("inf") else -1.0
        assert [param.tolist() for param in params] == [[expected] * 2] * 2
