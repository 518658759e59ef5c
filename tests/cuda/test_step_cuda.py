"""On a GPU: the step builder against torch's loop, without a sync, captured, and in few launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from funcamp import ScalerConfig, TrainState, float8, jit, schedule, stateless
from tests.recipes import values
from tests.support.generated import generated, launches
from tests.support.helpers import assert_close, assert_no_sync, assert_same, to
from tests.support.models import Task, cnn, mlp, on_gpu, tied
from tests.support.steps import build
from tests.support.torch_loop import AmpLoop

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic")]

STEPS = 30
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# 2**24 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = ScalerConfig(init_scale=2.0**24, growth_interval=5)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 2e-3}),
}


def torch_loop(make: Callable[[], Task], name: str, clip: float | None) -> tuple[list[Any], dict[str, Tensor]]:
    task = on_gpu(make())
    cls, arguments = OPTIMIZERS[name]
    optimizer = cls(task.model.parameters(), **{"foreach": False, **arguments})  # the arithmetic that `stateless` runs
    loop = AmpLoop(task.model, task.criterion, optimizer, CONFIG, device="cuda")
    trace = [loop.step(task.batch(index), max_norm=clip)[1:] for index in range(STEPS)]
    return trace, values(task.model)


def step_of(task: Task, name: str, **options: Any) -> Any:
    cls, arguments = OPTIMIZERS[name]
    return build(task, stateless(cls, **arguments), config=CONFIG, policy="float16", **options)


def run(task: Task, step: Any, call: Callable[..., Any], flat: bool = True) -> tuple[list[Any], TrainState]:
    state, trace = step.init(flat=flat), []
    for index in range(STEPS):
        state, metrics = call(state, task.batch(index))
        trace.append((metrics.scale.item(), metrics.found_inf.item()))
    return trace, state


def tree_of(state: TrainState) -> dict[str, Tensor]:
    tree: dict[str, Tensor] = state.params.tree()
    return tree


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_eager_step_is_torchs_loop_bit_for_bit(make: Callable[[], Task], flat: bool) -> None:
    expected, params = torch_loop(make, "SGD", None)
    task = on_gpu(make())
    step = step_of(task, "SGD", keep_buffers=True)
    trace, state = run(task, step, step, flat=flat)
    assert trace == expected
    assert 1.0 in [skipped for _, skipped in trace]
    assert_same(tree_of(state), params)


# Without exact rounding the gradients that overflow are others. With it products are still rounded before a bias is
# added, which eager code does once: the two runs drift apart by last bits.
@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_compiled_step_follows_torchs_loop(make: Callable[[], Task]) -> None:
    expected, params = torch_loop(make, "AdamW", 1.0)
    task = on_gpu(make())
    step = step_of(task, "AdamW", max_norm=1.0)
    trace, state = run(task, step, jit(step, exact=True, capture=False))
    assert trace == expected
    assert_close(tree_of(state), params, 2.0**-5)


def test_eager_and_compiled_steps_do_not_sync() -> None:
    task = on_gpu(mlp(dropout=0.5))
    step = step_of(task, "AdamW", max_norm=1.0, ema_decay=0.9, accumulate=2)
    batch = tuple(torch.stack([leaf] * 2) for leaf in task.batch(0))
    call, state = torch.compile(step, fullgraph=True), step.init()
    state, _ = call(state, batch)
    step(state, batch)  # the first calls load kernels and set up cuBLAS
    with assert_no_sync():
        for _ in range(3):
            state, _ = call(state, batch)
            step(state, batch)


@pytest.mark.parametrize("wrap", [lambda step: step, jit], ids=["eager", "jit"])
def test_values_of_a_scheduler_are_on_the_device_also_for_a_state_of_another_optimizer(wrap: Any) -> None:
    task = on_gpu(mlp())
    plain = stateless(torch.optim.AdamW, lr=0.5)
    scheduled = schedule(plain, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), steps=4)
    state = build(task, plain, config=CONFIG).init()
    run, batch = wrap(build(task, scheduled, config=CONFIG)), task.batch(0)
    rates = []
    for number in range(6):
        with contextlib.nullcontext() if number < 3 else assert_no_sync():  # the first copy the values, and capture
            state, metrics = run(state, batch)
            rates.append(metrics.lr.clone())
    assert [rate.item() for rate in rates] == [0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0625]


def test_launches_do_not_grow_with_the_number_of_tensors() -> None:
    counts = []
    for layers in (4, 16):
        modules = [torch.nn.Linear(64, 64) for _ in range(layers)]
        task = Task(torch.nn.Sequential(*modules), torch.nn.functional.mse_loss, lambda _: (torch.ones(8, 64),) * 2)
        step = step_of(on_gpu(task), "AdamW", max_norm=1.0)
        counts.append(launches(generated(step, step.init(), to(task.batch(0), "cuda"))))
    # A layer has its products (not launches here), a copy of its weight's gradient, and a sum for its bias's: 28.
    assert counts[1] - counts[0] <= 3 * 12, counts


class Masked(torch.nn.Module):
    """Attention with a mask, which flash attention does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def masked() -> Task:
    torch.manual_seed(0)

    def batch(index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(index))
        return x, x.roll(1, 1)

    return Task(Masked(), lambda output, target: torch.nn.functional.mse_loss(output.float(), target), batch)


def in_float8(model: torch.nn.Module) -> None:
    """Let the layers multiply in float8 whose sizes fit."""
    odd = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and any(size % 16 for size in module.weight.shape):
            odd.append(name)
    float8.convert(model, keep=odd)


# Attention's own kernels, so not under `deterministic`, which takes plain products.
@pytest.mark.parametrize("precision", [None, "bfloat16", "float16", "float8"])
@pytest.mark.parametrize("make", [tied, masked])
def test_captured_step_follows_the_eager_one_in_every_precision(
    make: Callable[[], Task], precision: str | None
) -> None:
    task, tolerance, policy = on_gpu(make()), 2e-2, precision
    if precision == "float8":
        in_float8(task.model)
        tolerance, policy = 0.1, "bfloat16"
    step = build(task, stateless(torch.optim.SGD, lr=0.05), config=ScalerConfig(1024.0), policy=policy)
    captured, state = jit(step), step.init()
    called = step.init()
    with torch.nn.attention.sdpa_kernel(list(BACKENDS)):
        for index in range(5):
            batch = task.batch(index)
            state, found = captured(state, batch)
            called, expected = step(called, batch)
            assert_close(found.loss, expected.loss, tolerance)
    assert_close(tree_of(state), tree_of(called), tolerance)
