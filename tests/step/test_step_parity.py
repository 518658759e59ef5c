"""The step builder follows torch's documented mixed-precision loop, over whole runs.

Scales and skips are equal at every step. Parameters are bit-equal with optimizers whose arithmetic is torch's operation
for operation: so the same float16 numbers went into every matrix product and came out of it, a weight used twice or in
two precisions included. With AdamW and clipping they are within a fraction of a parameter's norm: AdamW rounds its
step size elsewhere than torch's CPU default does, the norm is summed in float64, and a last bit can move a copy to its
neighbour, 2^-11 of it in float16 and 2^-8 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, TrainState, by_group, make_train_step, module_loss, stateless
from funcamp._types import name_of
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import eager

STEPS = 50
# 2**24 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = ScalerConfig(init_scale=2.0**24, growth_interval=5)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
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


def compiled(step: Any) -> Any:
    return torch.compile(step, fullgraph=True, backend="aot_eager")


FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "dict"])


def build(task: Task, name: str, dtype: torch.dtype, **options: Any) -> Any:
    cls, arguments = OPTIMIZERS[name]
    loss_fn = module_loss(task.model, task.criterion)
    policy = name_of(dtype)
    return make_train_step(loss_fn, stateless(cls, **arguments), CONFIG, policy=policy, **options)


def batches(task: Task, step: int, parts: int) -> tuple[Tensor, Tensor]:
    if parts == 1:
        return task.batch(step)
    pieces = [task.batch(step * parts + part) for part in range(parts)]
    return torch.stack([x for x, _ in pieces]), torch.stack([y for _, y in pieces])


def tree_of(state: TrainState) -> dict[str, Tensor]:
    params: dict[str, Tensor] = state.params.tree()
    return params


def run(
    task: Task, step: Any, transform: Callable[[Any], Any], parts: int = 1, flat: bool = True
) -> tuple[Trace, TrainState]:
    state, call = step.init(flat=flat), transform(step)
    trace = []
    for index in range(STEPS):
        before = state
        state, metrics = call(state, batches(task, index, parts))
        skipped = bool(metrics.found_inf)
        trace.append((metrics.scale.item(), skipped))
        if skipped:
            counts = {name: getattr(before, name) + 1 for name in ("step", "skipped", "consecutive_skips")}
            assert_same(state, before._replace(**counts, scaler=state.scaler))
            assert state.scaler.scale < before.scaler.scale
    return trace, state


@pytest.mark.thorough(keep=2)
@FLAT
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_step_is_the_eager_loop_bit_for_bit(make: Any, name: str, dtype: torch.dtype, flat: bool) -> None:
    assert_follows_bit_for_bit(make, name, dtype, flat, eager)


def penalized() -> Task:
    """An MLP with a penalty on its weights in the criterion, which torch's loop computes from the full weights."""
    task = mlp()

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return task.criterion(out, y) + 1e-2 * sum(weight.square().sum() for weight in task.model.parameters())

    return task._replace(criterion=criterion)


@FLAT
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_penalty_in_the_criterion_is_of_the_full_weights(dtype: torch.dtype, flat: bool) -> None:
    assert_follows_bit_for_bit(penalized, "SGD", dtype, flat, eager)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("make", "name", "dtype", "flat"),
    [
        (mlp, "SGD", torch.float16, False),  # flat storage, compiled: test_compiled_adamw_with_clipping_follows
        (mlp, "RMSprop", torch.bfloat16, True),
        (cnn, "SGD", torch.float16, True),
        # No weight with two uses: under torch.func autocast casts it twice, and its gradients are added in float32.
        (mlp, "SGD", torch.bfloat16, True),
        (mlp, "RMSprop", torch.float16, False),
    ],
)
def test_compiled_step_is_the_eager_loop_bit_for_bit(make: Any, name: str, dtype: torch.dtype, flat: bool) -> None:
    assert_follows_bit_for_bit(make, name, dtype, flat, compiled)


def assert_follows_bit_for_bit(make: Any, name: str, dtype: torch.dtype, flat: bool, transform: Any) -> None:
    task = make()
    start = clone(values_of(task.model))
    trace, state = run(task, build(task, name, dtype), transform, flat=flat)
    assert_same(values_of(task.model), start)
    expected_trace, model = torch_loop(task, name, dtype)
    assert trace == expected_trace
    if dtype == torch.float16:
        assert sum(skipped for _, skipped in trace) >= 4
    assert_same(tree_of(state), {key: value.detach() for key, value in model.named_parameters()})


@pytest.mark.thorough(keep=2)
@FLAT
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2.0**-13), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_adamw_with_clipping_follows(make: Any, dtype: torch.dtype, tolerance: float, flat: bool) -> None:
    assert_follows_with_adamw(make, dtype, tolerance, flat, eager)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [(mlp, torch.float16, 2.0**-13), (cnn, torch.bfloat16, 2.0**-8)],
)
def test_compiled_adamw_with_clipping_follows(make: Any, dtype: torch.dtype, tolerance: float) -> None:
    assert_follows_with_adamw(make, dtype, tolerance, True, compiled)


def assert_follows_with_adamw(make: Any, dtype: torch.dtype, tolerance: float, flat: bool, transform: Any) -> None:
    task = make()
    trace, state = run(task, build(task, "AdamW", dtype, max_norm=0.5), transform, flat=flat)
    expected_trace, model = torch_loop(task, "AdamW", dtype, clip=0.5)
    assert trace == expected_trace
    assert_close(tree_of(state), {key: value.detach() for key, value in model.named_parameters()}, tolerance)


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize(("make", "dtype"), [(mlp, torch.bfloat16), (tied, torch.float16)])
def test_generated_code_follows_torchs_loop(make: Any, dtype: torch.dtype) -> None:
    # Inductor keeps intermediates in float32 that eager rounds to the low precision: 50 steps apart by that, no more.
    task = make()
    trace, state = run(task, build(task, "SGD", dtype), lambda step: torch.compile(step, fullgraph=True))
    expected_trace, model = torch_loop(task, "SGD", dtype)
    assert trace == expected_trace
    assert_close(tree_of(state), {key: value.detach() for key, value in model.named_parameters()}, 2.0**-6)


@pytest.mark.thorough(keep=2)
@FLAT
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_accumulation_is_the_eager_loop_bit_for_bit(make: Any, flat: bool) -> None:
    task = make()
    trace, state = run(task, build(task, "SGD", torch.float16, accumulate=3), eager, parts=3, flat=flat)
    expected_trace, model = torch_loop(task, "SGD", torch.float16, parts=3)
    assert trace == expected_trace
    assert_same(tree_of(state), {key: value.detach() for key, value in model.named_parameters()})


@FLAT
def test_groups_are_torchs_parameter_groups(flat: bool) -> None:
    task = tied()
    cls, arguments = OPTIMIZERS["SGD"]
    optimizer = by_group(
        {"matrix": stateless(cls, weight_decay=0.1, **arguments), "vector": stateless(cls, **arguments)}
    )
    loss_fn = module_loss(task.model, task.criterion)
    step = make_train_step(loss_fn, optimizer, CONFIG, policy="float16")
    trace, state = run(task, step, eager, flat=flat)
    expected_trace, model = torch_loop(task, "SGD", torch.float16, by_shape=True)
    assert trace == expected_trace
    # The positions are a matrix to both: three dimensions.
    assert_same(tree_of(state), {key: value.detach() for key, value in model.named_parameters()})


@pytest.mark.parametrize("make", [lambda: mlp(dropout=0.3)])
def test_dropout_draws_what_the_eager_loop_draws(make: Any) -> None:
    task = make()
    torch.manual_seed(7)
    trace, state = run(task, build(task, "SGD", torch.float16), eager)
    torch.manual_seed(7)
    expected_trace, model = torch_loop(task, "SGD", torch.float16)
    assert trace == expected_trace
    assert_same(tree_of(state), {key: value.detach() for key, value in model.named_parameters()})
