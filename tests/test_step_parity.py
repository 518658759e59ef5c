"""The step builder follows torch's documented mixed-precision loop, over whole runs.

Scales and skips are equal at every step. Parameters: bit-equal in the eager step with SGD, whose arithmetic is torch's own
operation for operation (the same float16 numbers went into every matrix product, and the same came out). Otherwise within a
fraction of a parameter's norm: 1e-5, because AdamW rounds its step size elsewhere than torch's CPU default does, the norm is
summed in float64, and one such rounding can move a float16 copy to its neighbour; bfloat16's neighbours are 8 times farther.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, TrainState, by_group, make_train_step, module_loss, stateless
from tests.helpers import assert_close, assert_same, clone
from tests.models import Task, cnn, mlp, tied

STEPS = 50
# 2**24 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = ScalerConfig(init_scale=2.0**24, growth_interval=5)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 2e-3}),
}
Trace = list[tuple[float, bool]]


def torch_loop(
    task: Task, name: str, dtype: torch.dtype, *, clip: float | None = None, parts: int = 1, by_shape: bool = False
) -> tuple[Trace, nn.Module]:
    """torch's loop, as its automatic mixed precision examples have it."""
    model = task.model
    cls, arguments = OPTIMIZERS[name]
    groups: Any = model.parameters()
    if by_shape:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
    optimizer = cls(groups, **arguments)
    scaler = torch.amp.GradScaler("cpu", CONFIG.init_scale, growth_interval=CONFIG.growth_interval)
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            x, y = task.batch(step * parts + part)
            with torch.autocast("cpu", dtype):
                loss = task.criterion(model(x), y)
                loss = loss / parts
            scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        trace.append((before, scaler.get_scale() < before))
    return trace, model


def batches(task: Task, step: int, parts: int) -> tuple[Tensor, Tensor]:
    if parts == 1:
        return task.batch(step)
    pieces = [task.batch(step * parts + part) for part in range(parts)]
    return torch.stack([x for x, _ in pieces]), torch.stack([y for _, y in pieces])


def tree_of(state: TrainState) -> dict[str, Tensor]:
    params: dict[str, Tensor] = state.params.tree() if hasattr(state.params, "tree") else state.params
    return params


def run(task: Task, step: Any, transform: Callable[[Any], Any], parts: int = 1) -> tuple[Trace, TrainState]:
    state, call = step.init(), transform(step)
    trace = []
    for index in range(STEPS):
        before = state
        state, metrics = call(state, batches(task, index, parts))
        skipped = bool(metrics.found_inf)
        trace.append((metrics.scale.item(), skipped))
        if skipped:
            unchanged = {"step": before.step + 1, "scaler": state.scaler}
            assert_same(state, before._replace(**unchanged))
            assert state.scaler.scale < before.scaler.scale
    return trace, state


def eager(step: Any) -> Any:
    return step


def compiled(step: Any) -> Any:
    return torch.compile(step, fullgraph=True, backend="aot_eager")


def inductor(step: Any) -> Any:
    return torch.compile(step, fullgraph=True)


@pytest.mark.parametrize("transform", [eager, compiled])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "dict"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_step_follows_the_eager_loop(
    make: Callable[[], Task], name: str, dtype: torch.dtype, flat: bool, transform: Any
) -> None:
    task = make()
    clip = None if name == "SGD" else 0.5
    cls, arguments = OPTIMIZERS[name]
    step = make_train_step(
        module_loss(task.model, task.criterion),
        stateless(cls, **arguments),
        CONFIG,
        policy=str(dtype).removeprefix("torch."),
        max_norm=clip,
        flat=flat,
    )
    before = clone(task.model.state_dict())
    trace, state = run(task, step, transform)
    assert_same(dict(task.model.state_dict()), dict(before))
    expected_trace, model = torch_loop(task, name, dtype, clip=clip)
    assert trace == expected_trace
    if dtype == torch.float16:
        assert sum(skipped for _, skipped in trace) >= 4
    expected = {key: value.detach() for key, value in model.named_parameters()}
    if name == "SGD" and transform is eager:
        assert_same(tree_of(state), expected)
    assert_close(tree_of(state), expected, 1e-5 if dtype == torch.float16 else 1e-4)
