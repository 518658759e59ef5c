"""The training step, every way there is to write it: what `step.py` times side by side.

Each maker takes a size, a type of device and the low precision, and returns a call that takes one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _models import Size, build, cross_entropy
from _public import PUBLIC_GPU_SIZES, PUBLIC_SIZES, public_task
from torch import Tensor, nn

import funcamp
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._jit.cuda_graph import CudaGraphs
from funcamp._types import name_of
from funcamp.distributed import DataParallel

Maker = Callable[[Size, str, torch.dtype], Callable[[], Any]]
LR = 1e-4
NEVER = 10**6  # a growth interval: the scale stays, so that no step is skipped


def task(size: Size, device: str) -> tuple[nn.Module, Any, Callable[[Any, Tensor], Tensor] | None]:
    """A fresh model, one batch, and the criterion; None where the model returns its loss, from a dict."""
    if size in (PUBLIC_SIZES | PUBLIC_GPU_SIZES).values():
        return public_task(size, device)
    model, x, y = build(size, device)
    return model, (x, y), cross_entropy


def torch_loop(size: Size, device: str, dtype: torch.dtype, *, mode: str | None = None) -> Callable[[], None]:
    """torch's documented loop: autocast, GradScaler, fused AdamW; the model compiled in a mode of torch.compile."""
    model, batch, criterion = task(size, device)
    forward = model if mode is None else torch.compile(model, mode=mode)
    scaler = torch.amp.GradScaler(device, growth_interval=NEVER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = forward(**batch).loss if criterion is None else criterion(forward(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def partial_capture(size: Size, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """PyTorch's documented capture with a scaler: forward and backward in a graph, `step` and `update` outside."""
    model, x, y = build(size, device)
    scaler = torch.amp.GradScaler(device, growth_interval=NEVER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def forward_backward() -> None:
        with torch.autocast(device, dtype, cache_enabled=False):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    graph = captured(forward_backward, before=lambda: optimizer.zero_grad(set_to_none=True))

    def step() -> None:
        graph()
        scaler.step(optimizer)
        scaler.update()

    return step


def captured(run: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Callable[[], None]:
    """A call that replays what run did, after three calls to warm up; a failure spoils nothing for other variants."""
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))

    def body() -> list[Tensor]:
        run()
        return []

    graphs.warm_up(lambda: (before(), run()), 3)
    before()
    replay = graphs.capture(body)[0]

    def call(kept: Any = (run, before)) -> None:  # noqa: ARG001  # a graph keeps no memory that it reads
        replay()

    return call


def funcamp_step(
    size: Size,
    device: str,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
    config: funcamp.ScalerConfig = funcamp.ScalerConfig(growth_interval=NEVER),
    flat: bool = True,
    change: Callable[[ModuleLoss], ModuleLoss] = lambda loss_fn: loss_fn,
    parallel: DataParallel | None = None,
    consume: bool | None = None,
    policy: str | None = None,
    max_norm: float | None = None,
    **options: Any,
) -> Callable[[], Any]:
    """The step as a pure function: eager, or by `funcamp.jit` with these options; a call returns its metrics.

    The state takes the module's place where consume is set, which is by default wherever it can. A policy replaces that
    of dtype.
    """
    model, batch, criterion = task(size, device)
    loss_fn = change(funcamp.module_loss(model, criterion))
    adamw = funcamp.stateless(torch.optim.AdamW, lr=LR)
    precision = policy or name_of(dtype)
    step = funcamp.make_train_step(loss_fn, adamw, config, policy=precision, parallel=parallel, max_norm=max_norm)
    run: Callable[..., Any] = funcamp.jit(step, **options) if compiled else step
    state = [step.init(flat=flat, consume=not (parallel and parallel.shard) if consume is None else consume)]

    def call() -> Any:
        state[0], metrics = run(state[0], batch)
        return metrics

    return call


def captured_loop(size: Size, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """The loop of `torch_loop` with funcamp.GradScaler, captured into one CUDA graph."""
    model, x, y = build(size, device)
    scaler = funcamp.GradScaler(device, growth_interval=NEVER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, capturable=True, fused=True)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, dtype, cache_enabled=False):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return captured(step, before=model.zero_grad)


UNSCALED = funcamp.presets.disabled()
PEERS: dict[str, Maker] = {
    "torch eager, GradScaler": torch_loop,
    "torch.compile(model), GradScaler": functools.partial(torch_loop, mode="default"),
}
PEERS_ON_A_GPU: dict[str, Maker] = {
    'torch.compile(model, mode="reduce-overhead"), GradScaler': functools.partial(torch_loop, mode="reduce-overhead"),
    "forward and backward captured, GradScaler outside": partial_capture,
}
OURS: dict[str, Maker] = {
    "funcamp.jit": funcamp_step,
    "funcamp.jit, unscaled bfloat16": lambda size, device, _: funcamp_step(
        size, device, torch.bfloat16, config=UNSCALED
    ),
}
OURS_ON_A_GPU: dict[str, Maker] = {
    "funcamp.GradScaler, the loop captured": captured_loop,
    "funcamp.jit, capture=False": functools.partial(funcamp_step, capture=False),
    "funcamp.jit, kernels apart": functools.partial(funcamp_step, without=("combo_kernels",)),
}
FORMS: dict[str, Maker] = {
    "funcamp.jit, a tensor a parameter": functools.partial(funcamp_step, flat=False),
    "funcamp.jit, donate=False": functools.partial(funcamp_step, donate=False),
    "funcamp.jit, exact=True": functools.partial(funcamp_step, exact=True),
    "funcamp, eager": functools.partial(funcamp_step, compiled=False),
    "funcamp, eager, a tensor a parameter": functools.partial(funcamp_step, compiled=False, flat=False),
}
