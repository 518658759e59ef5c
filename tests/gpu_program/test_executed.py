"""The GPU's program of a step, executed, against the step run eagerly.

One test reads its program only: `make test` runs it in the process that it starts for the others here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import by_group, float8, jit, numerics, stateless
from tests.gpu_program.compare import assert_follows_eager
from tests.gpu_program.steps import step_of
from tests.support.gpu_program import on_gpu, program_of
from tests.support.helpers import assert_close, assert_same
from tests.support.models import Task, cnn, mlp, tied

pytestmark = pytest.mark.inductor  # for the C++ compiler

adamw = stateless(torch.optim.AdamW, lr=1e-2)


def micro_batches(batch: Callable[[int], tuple[Tensor, Tensor]], count: int = 2) -> Callable[[int], Any]:
    """So many in each batch."""
    return lambda number: [torch.stack(parts) for parts in zip(*[batch(count * number + i) for i in range(count)])]


def wide() -> Task:
    """A matrix of 65,536 elements: its check is summed in two kernels, its update has blocks without a mask."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    return Task(model, lambda output, _: (output.sum(1) - 4).square().mean(), mlp().batch)


@pytest.mark.thorough
def test_an_mlp_with_clipping_follows_the_eager_step() -> None:
    task = mlp()
    assert_follows_eager(step_of(task.model, task.criterion, adamw, scale=2.0**20, max_norm=1.0), task.batch, 1e-2, 5)


@pytest.mark.thorough
def test_a_gpt_with_tied_weights_follows_the_eager_step() -> None:
    task = tied()
    assert_follows_eager(step_of(task.model, task.criterion, adamw, scale=2.0**16, max_value=0.1), task.batch, 1e-2, 6)


@pytest.mark.thorough
def test_a_cnn_in_cudnns_layout_with_a_tensor_a_parameter_follows_the_eager_step() -> None:
    task = cnn()
    sgd = stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
    with torch._inductor.config.patch(force_layout_optimization=True):  # small as it is
        assert_follows_eager(step_of(task.model, task.criterion, sgd, scale=2.0**16), task.batch, 2e-2, 6, flat=False)


@pytest.mark.thorough
def test_muon_and_adamw_with_micro_batches_and_an_average_follow_the_eager_step() -> None:
    task = mlp()
    optimizer = by_group({"matrix": stateless(torch.optim.Muon, lr=0.01, ns_steps=2), "vector": adamw})
    step = step_of(task.model, task.criterion, optimizer, scale=2.0**20, accumulate=2, ema_decay=0.9)
    assert_follows_eager(step, micro_batches(task.batch), 3e-2, 6)


@pytest.mark.thorough
def test_float32_with_large_matrices_and_without_exact_follows_the_eager_step() -> None:
    task = wide()
    step = step_of(task.model, task.criterion, adamw, policy=None, scale=2.0**127, max_norm=1.0)
    assert_follows_eager(step, task.batch, 1e-3, 6, exact=False)


def test_layers_in_float8_follow_the_eager_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    float8.convert(model)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        large = 2.0**20 if number % 2 else 1.0  # its gradients overflow at this scale
        return torch.randn(16, 16, generator=draw), torch.randn(16, 16, generator=draw) * large

    # Triton 3.7's interpreter loses the carry when it rounds up to a power of two: 1.95 becomes 1 instead of 2. AdamW
    # would make whole steps of that.
    sgd = stateless(torch.optim.SGD, lr=0.1)
    assert_follows_eager(step_of(model, F.mse_loss, sgd, "bfloat16", 2.0**120, max_norm=1.0), batch, 3e-2, 4)


@pytest.mark.thorough
def test_tracked_steps_two_in_a_call_count_as_the_eager_ones() -> None:
    """Two steps a call, and what every layer holds is counted in each."""
    task = mlp()
    step = step_of(task.model, task.criterion, adamw, policy=None, scale=2.0**10, tracked=True)
    state, gpu, program = step.init(), step.init(), jit(step, unroll=2)
    with on_gpu():
        for call in range(2):
            gpu, metrics = program(gpu, micro_batches(task.batch)(call))
            for number in range(2):
                state, expected = step(state, task.batch(2 * call + number))
                for name, record in expected.records.items():
                    found = metrics.records[name]
                    assert_close(_moments(found, number), _moments(record), 1e-2)
    assert_same(gpu.scaler, state.scaler)
    assert_close((gpu.params, gpu.opt_state), (state.params, state.opt_state), 1e-4)


def _moments(record: numerics.Record, row: int | None = None) -> list[Tensor]:
    """How many were counted in each pass, and their standard deviation."""
    parts = [value for one in (record.forward, record.backward) for value in (one.count, one.std)]
    return parts if row is None else [part[row] for part in parts]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout_drops_the_same_in_both_passes_and_as_many_as_it_says(dtype: torch.dtype) -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        leaf = state.detach().requires_grad_()
        out = F.dropout(leaf * batch, 0.25)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        return state, (out.detach(), grad)

    ones = torch.ones(5000, dtype=dtype)
    program = jit(step)
    with on_gpu():
        seen = [program(ones, ones)[1] for _ in range(3)]
    for out, grad in seen:
        assert_same(out, grad)
        assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75, dtype=dtype).item()}
        # Four standard deviations.
        assert abs((out == 0).float().mean().item() - 0.25) < 4 * (0.25 * 0.75 / 5000) ** 0.5
    assert not torch.equal(seen[0][0], seen[1][0])


def test_memory_of_attentions_seeds_is_no_other_buffers() -> None:
    """torch describes them as on the GPU; outside of a capture they are on the host. A count has their size."""

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        x = state.detach().requires_grad_()
        out = batch
        for _ in range(2):
            out = F.scaled_dot_product_attention(out * x, out, out)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return state - grad, (grad > 0).sum()

    x = torch.zeros(2, 2, 8, 16)
    body = program_of(step, x, x).body
    attentions = re.findall(r"(buf\d+) = torch.ops.aten._scaled_dot_product\w*attention.default", body)
    assert len(attentions) == 2
    for attention in attentions:
        parts = re.findall(rf"(buf\d+) = {attention}\[[2-9]\]", body)
        for part in parts:
            assert not re.search(rf"{part}\b.*# reuse", body), part
