"""What a step does beside following torch's loop: windows, limits, flags, counts and what a loss returns beside."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import ScalerConfig, loss, make_train_step, presets, stateless
from tests.support.helpers import assert_close, assert_same, clone, values_of
from tests.support.models import cnn, mlp
from tests.support.steps import SGD, build

ADAMW = stateless(torch.optim.AdamW, lr=1e-2)


def linear(params: Any, batch: Tensor) -> Tensor:
    """A loss whose gradient is the batch."""
    total: Tensor = torch.stack([(params[name] * batch[index]).sum() for index, name in enumerate(params)]).sum()
    return total


def test_the_state_shares_nothing() -> None:
    task = cnn()
    before = clone(values_of(task.model))
    for flat in (True, False):
        state = build(task, ADAMW, policy="float16", ema_decay=0.9).init(flat=flat)
        leaves = _pytree.tree_leaves(state)
        pointers = [leaf.untyped_storage().data_ptr() for leaf in leaves]
        assert len(pointers) == len(set(pointers)), "two leaves of a state must not share storage: it may be donated"
        for leaf in leaves:
            leaf.fill_(0)
    assert_same(values_of(task.model), before)


@pytest.mark.parametrize("consume", [False, True])
def test_a_state_made_under_inference_mode_is_an_ordinary_one(consume: bool) -> None:
    """No step outside it could differentiate an inference tensor."""
    ends = []
    for mode in (False, True):
        task = cnn()
        step = build(task, ADAMW, ema_decay=0.5)
        with torch.inference_mode(mode):
            state = step.init(consume=consume)
            state = step.load_state_dict(step.state_dict(state), like=state, consume=consume)
        leaves = _pytree.tree_leaves((state, *task.model.parameters(), *task.model.buffers()))
        assert not any(leaf.is_inference() for leaf in leaves)
        ends.append(step(state, task.batch(0)))
    assert_same(*ends)


def test_a_partial_window_is_the_mean_over_what_is_there() -> None:
    task = mlp()
    window, single = (build(task, SGD, accumulate=k) for k in (4, 1))
    for parts in (1, 3, 4):
        columns = list(zip(*[task.batch(index) for index in range(parts)]))
        state, metrics = window(window.init(), tuple(map(torch.stack, columns)))
        expected, expected_metrics = single(single.init(), tuple(map(torch.cat, columns)))
        assert_close((state.params, metrics[:2]), (expected.params, expected_metrics[:2]), 1e-6)


# One reading of the gradients gives the flag and the norm.


@pytest.mark.thorough(keep=4)
@pytest.mark.compiled
@pytest.mark.parametrize("exponents", [(-30, -3, 0), (-5, 18, 19.2), (18.9, 25, 38), (-44, 38, 38)])
def test_gradients_of_all_magnitudes_clip_as_in_float64(
    exponents: tuple[float, ...], transform: Callable[..., Any]
) -> None:
    """Also finite ones whose squares or whose norm overflow float32; torch multiplies those by 0."""
    step = make_train_step(linear, stateless(torch.optim.SGD, lr=1.0), presets.disabled(), max_norm=1.0)
    run = transform(lambda state, grads: step(state, [grads]))
    for count in (40, 3001):
        grads = (torch.rand(3, count, dtype=torch.float64) + 1) * torch.tensor([10.0**e for e in exponents])[:, None]
        grads = grads.flatten().float()
        after, metrics = run(step.init({"a": torch.zeros(3 * count)}), grads)
        exact = grads.double()
        expected = -exact * (1.0 / (exact.norm() + 1e-6)).clamp(max=1.0)
        assert metrics.found_inf == 0
        torch.testing.assert_close(metrics.grad_norm, exact.norm().float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(after.params["a"].double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [4096, 6144 + 7, 2 * 64 * 2048 + 3 * 2048 + 7])
def test_a_large_gradient_is_read_to_its_last_element(size: int, value: float) -> None:
    """An eager step on a CPU reads it part by part: of 64 rows of 2,048 elements, of fewer rows, and a rest."""
    step = make_train_step(linear, SGD, presets.disabled())
    state, grads = step.init({"a": torch.zeros(size)}), torch.randn(size)
    _, metrics = step(state, grads[None])
    torch.testing.assert_close(metrics.grad_norm.double(), grads.double().norm(), rtol=1e-6, atol=0)
    for place in (0, 2047, 2048, size // 2, size - 1):
        assert step(state, grads.index_fill(0, torch.tensor(place), value)[None])[1].found_inf == 1


@pytest.mark.parametrize("size", [1e150, 1e200, 1.7e308])
def test_a_finite_float64_gradient_steps(size: float) -> None:
    step = make_train_step(linear, SGD, presets.disabled(), max_norm=1.0)
    state = step.init({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2)})
    batch = [torch.full((2,), size, dtype=torch.float64), torch.ones(2)]
    after, metrics = step(state, batch)
    assert metrics.found_inf == 0
    length = after.params["a"].norm().item()  # a norm whose square is beyond float64 counts as infinite
    assert length == (pytest.approx(0.1) if size < 1e154 else 0.0)
    batch[0][1] = math.inf
    assert step(state, batch)[1].found_inf == 1


def test_a_gradient_that_overflows_by_unscaling_is_found() -> None:
    step, batch = make_train_step(linear, SGD, presets.static(2.0**-10)), torch.full((1, 2), 3e38)
    state = step.init({"a": torch.zeros(2)})
    assert step(state, batch)[1].found_inf == 0
    low = state._replace(scaler=state.scaler._replace(scale=torch.tensor(1e-45)))
    after, metrics = step(low, batch)
    assert metrics.found_inf == 1
    assert_same(after.params, state.params)


# What a loss returns beside.


def test_buffers_and_aux_come_back_and_aux_is_stacked() -> None:
    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        beside = {"seen": batch.sum(), "row": batch, "weight": params["w"]}
        return (params["w"] * batch).sum(), ({"count": buffers["count"] + 1}, beside)

    for accumulate, batch in ((1, torch.ones(3)), (2, torch.ones(2, 3))):
        step = make_train_step(loss(loss_fn, has_aux=True, has_buffers=True), SGD, accumulate=accumulate)
        first = step.init({"w": torch.ones(3)}, {"count": torch.zeros(())})
        state, metrics = step(first, batch)
        assert state.buffers["count"] == accumulate
        assert_same(metrics.aux["seen"], batch.sum(-1))
        assert_same(metrics.aux["row"], batch)
        metrics.aux["weight"].zero_()  # a copy
        assert_same(first.params["w"], torch.ones(3))
        assert_same(step.loss(first, torch.ones(3)), torch.tensor(3.0))


# Metrics and counts.


def test_metrics_say_what_happened() -> None:
    step = make_train_step(linear, SGD, ScalerConfig(8.0))
    _, metrics = step(step.init({"a": torch.zeros(2)}), torch.tensor([[3.0, 4.0]]))
    assert {name: str(value) for name, value in metrics._asdict().items()} == {
        "loss": "tensor(0.)",
        "grad_norm": "tensor(5.)",
        "scale": "tensor(8.)",
        "lr": "tensor(0.1000)",
        "found_inf": "tensor(0.)",
        "exhausted": "tensor(0.)",
        "saturated": "tensor(0.)",
        "applied": "tensor(1)",
        "skipped": "tensor(0)",
        "consecutive_skips": "tensor(0)",
        "observed": "{}",
        "records": "{}",
        "aux": "()",
    }


def test_metrics_count_skips_and_tell_the_limits() -> None:
    step = make_train_step(linear, SGD, ScalerConfig(4.0, min_scale=2.0, max_scale=4.0, growth_interval=1))
    state, rows = step.init({"a": torch.zeros(2)}), []
    for overflows in (True, True, False, False, True, True, True):
        state, metrics = step(state, torch.tensor([[3.0, torch.inf if overflows else 4.0]]))
        names = ("applied", "skipped", "consecutive_skips", "exhausted", "saturated")
        rows.append(tuple(int(getattr(metrics, name)) for name in names))
    assert rows == [
        (0, 1, 1, 0, 0),
        (0, 2, 2, 1, 0),  # at min_scale
        (1, 2, 0, 0, 0),  # grows to max_scale
        (2, 2, 0, 0, 1),
        (2, 3, 1, 0, 0),
        (2, 4, 2, 1, 0),
        (2, 5, 3, 1, 0),
    ]
    assert [int(count) for count in (state.step, state.skipped, state.consecutive_skips)] == [7, 5, 3]


# What a step promises of itself.


@pytest.mark.compiled
def test_a_steady_loop_compiles_once() -> None:
    """It overflows, backs off and grows: no Python number that changes reaches the step."""
    from torch._dynamo.testing import CompileCounterWithBackend

    task, counter, scales = mlp(), CompileCounterWithBackend("eager"), set()
    adamw = stateless(torch.optim.AdamW, lr=lambda applied: 1e-3 / (1 + applied))
    config = ScalerConfig(2.0**24, growth_interval=2)
    step = build(task, adamw, config=config, policy="float16", max_norm=1.0, ema_decay=0.9)
    run = torch.compile(step, fullgraph=True, backend=counter)
    state = step.init()
    for index in range(12):
        state, metrics = run(state, task.batch(index))
        scales.add(metrics.scale.item())
        step(state, task.batch(index))  # what the eager step keeps for its next call must be no reason to compile
    assert counter.frame_count == 1  # else TORCH_LOGS=recompiles names it
    assert len(scales) > 2
    assert 0 < state.skipped < 12
