"""What the step builder does beside following torch's loop: averages, buffers, windows, limits, flags."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from funcamp import (
    Metrics,
    Params,
    ScalerConfig,
    TrainState,
    by_group,
    jit,
    loss,
    make_train_step,
    module_loss,
    presets,
    stateless,
)
from tests.support.helpers import assert_close, assert_same, clone, to, values_of
from tests.support.models import cnn, mlp
from tests.support.oracle import TorchRule, state_of
from tests.support.steps import SGD, build

ADAMW = stateless(torch.optim.AdamW, lr=1e-2)


def linear(params: Any, batch: Tensor) -> Tensor:
    """A loss whose gradient is the batch."""
    total: Tensor = torch.stack([(params[name] * batch[index]).sum() for index, name in enumerate(params)]).sum()
    return total


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
def test_skipped_step_changes_nothing_but_the_scale(flat: bool, transform: Callable[..., Any]) -> None:
    def schedule(applied: Tensor) -> Tensor:
        return 1e-2 / (1 + applied)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        loss: Tensor = (torch.tanh(batch @ params["w"] + params["b"]) @ params["v"]).float().square().mean()
        return loss

    step = make_train_step(
        loss_fn,
        stateless(torch.optim.AdamW, lr=schedule),
        ScalerConfig(256.0),
        policy="float16",
        max_norm=1.0,
        ema_decay=0.9,
    )
    run = transform(lambda state, batch: step(state, batch))
    params = {"w": torch.randn(4, 8), "b": torch.zeros(8), "v": torch.randn(8, 2)}
    state, metrics = run(step.init(params, flat=flat), torch.randn(3, 4))
    assert metrics.found_inf == 0
    after, metrics = run(state, torch.full((3, 4), torch.inf))
    assert metrics.found_inf == 1
    counts = {"step": torch.tensor(2), "skipped": torch.tensor(1), "consecutive_skips": torch.tensor(1)}
    assert_same(after, state._replace(**counts, scaler=after.scaler))
    assert after.scaler.scale == state.scaler.scale / 2
    again, metrics = run(after, torch.randn(3, 4))
    assert metrics.found_inf == 0
    assert again.opt_state[0].applied == 2
    assert again.step == 3


def test_a_state_is_copied_and_not_saved_as_an_object(tmp_path: Path) -> None:
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), SGD)
    state = step.init({"w": torch.ones(2)})
    assert_same(copy.deepcopy(state), state)
    assert_same(pickle.loads(pickle.dumps(state)), state)
    for saved in (state, {"state": state}):
        with pytest.raises(TypeError, match=r"torch.save: a TrainState must be saved by its tensors.*step.state_dict"):
            torch.save(saved, tmp_path / "state.pt")


def test_buffers_go_back_or_stay() -> None:
    for keep in (False, True):
        task = cnn()
        step = build(task, policy="float16", keep_buffers=keep, config=ScalerConfig(2.0**40))
        state, metrics = step(step.init(), task.batch(0))
        assert metrics.found_inf == 1
        assert state.buffers["1.num_batches_tracked"] == int(keep)
        with torch.autocast("cpu", torch.float16):
            task.model(task.batch(0)[0])
        if keep:
            assert_same(state.buffers, dict(task.model.named_buffers()))
        state, metrics = step(state._replace(scaler=state.scaler._replace(scale=torch.tensor(1.0))), task.batch(0))
        assert state.buffers["1.num_batches_tracked"] == 1 + keep


def test_running_statistics_follow_the_eager_module() -> None:
    task = cnn()
    step = build(task, stateless(torch.optim.SGD, lr=0.0), policy="bfloat16")
    state = step.init()
    for index in range(3):
        state, _ = step(state, task.batch(index))
        with torch.autocast("cpu", torch.bfloat16):
            task.model(task.batch(index)[0])
    assert_same(state.buffers, dict(task.model.named_buffers()))


@pytest.mark.parametrize("flat", [True, False])
def test_average_is_torchs(flat: bool) -> None:
    task = mlp()
    step = build(task, ADAMW, ema_decay=0.75)
    state = step.init(flat=flat)
    model = mlp().model
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)  # the first call copies
    for index in range(5):
        state, _ = step(state, task.batch(index))
        model.load_state_dict(state.params.state_dict())
        average.update_parameters(model)
    assert_close(state.ema.tree(), dict(average.module.named_parameters()), 1e-7)


@pytest.mark.parametrize("flat", [True, False])
def test_partial_window_is_the_mean_over_what_is_there(flat: bool) -> None:
    task = mlp()
    whole, single = (build(task, SGD, accumulate=k) for k in (4, 1))
    for parts in (1, 2, 3, 4):
        pieces = [task.batch(index) for index in range(parts)]
        stacked = torch.stack([x for x, _ in pieces]), torch.stack([y for _, y in pieces])
        joined = torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])
        state, metrics = whole(whole.init(flat=flat), stacked)
        expected, expected_metrics = single(single.init(flat=flat), joined)
        assert_close(state.params, expected.params, 1e-6)
        assert_close(metrics[:2], expected_metrics[:2], 1e-6)


def test_one_bad_micro_batch_skips_the_window() -> None:
    step = make_train_step(linear, SGD, accumulate=3)
    state = step.init({"a": torch.ones(2)})
    batch = torch.ones(3, 1, 2)
    batch[1, 0, 0] = torch.nan
    after, metrics = step(state, batch)
    assert metrics.found_inf == 1
    assert_same(after.params, state.params)
    assert after.scaler.scale == state.scaler.scale / 2


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
def test_a_norm_beyond_float32_clips(flat: bool, transform: Callable[..., Any]) -> None:
    """Finite gradients whose squares or whose norm overflow float32 clip to max_norm; torch multiplies them by 0."""
    config = presets.disabled()
    step = make_train_step(linear, stateless(torch.optim.SGD, lr=1.0), config, max_norm=1.0)
    state = step.init({"a": torch.zeros(4), "b": torch.zeros(2, 2)}, flat=flat)
    run = transform(lambda s, a, b: step(s, [a, b]))
    for size in (1e18, 1e19, 1e25, 3e38):
        grads = torch.full((2, 4), size)
        grads[0, 0] = -size
        after, metrics = run(state, grads[0], grads[1].reshape(2, 2))
        assert metrics.found_inf == 0, size
        params = after.params.tree()
        length = torch.cat([params["a"], params["b"].flatten()]).norm()
        assert length.item() == pytest.approx(1.0, rel=1e-5), size
        assert params["a"][0] > 0 > params["a"][1], size
        if size < 1e19:
            assert metrics.grad_norm.item() == pytest.approx(size * math.sqrt(8), rel=1e-6)


@pytest.mark.parametrize("exponents", [(-30, -3, 0), (-5, 18, 19.2), (18.9, 25, 38), (0, 30, 38), (-44, 38, 38)])
@pytest.mark.parametrize("count", [40, 3001])
def test_a_mixture_of_magnitudes_clips_as_in_float64(exponents: tuple[float, ...], count: int) -> None:
    step = make_train_step(linear, stateless(torch.optim.SGD, lr=1.0), presets.disabled(), max_norm=1.0)
    grads = (torch.rand(3, count, dtype=torch.float64) + 1) * torch.tensor([10.0**e for e in exponents])[:, None]
    grads = grads.flatten().float()
    after, metrics = step(step.init({"a": torch.zeros(3 * count)}), grads[None])
    exact = grads.double()
    expected = -exact * (1.0 / (exact.norm() + 1e-6)).clamp(max=1.0)
    assert metrics.found_inf == 0
    torch.testing.assert_close(after.params.tree()["a"].double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [4096, 5000, 6144])
def test_a_large_gradient_is_checked_to_its_last_element(size: int, value: float) -> None:
    step = make_train_step(linear, SGD, presets.disabled())
    for place in (0, 2047, 2048, 4095, size - 1):
        batch = torch.full((1, size), 1e-3)
        assert step(step.init({"a": torch.zeros(size)}), batch)[1].grad_norm.item() == pytest.approx(
            1e-3 * math.sqrt(size), rel=1e-6
        )
        batch[0, place] = value
        assert step(step.init({"a": torch.zeros(size)}), batch)[1].found_inf == 1


@pytest.mark.parametrize("size", [1e150, 1e200, 1.7e308])
def test_a_finite_float64_gradient_steps(size: float) -> None:
    step = make_train_step(linear, SGD, presets.disabled(), max_norm=1.0)
    state = step.init({"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2)})
    batch = [torch.full((2,), size, dtype=torch.float64), torch.ones(2)]
    after, metrics = step(state, batch)
    assert metrics.found_inf == 0
    length = after.params.tree()["a"].norm().item()  # a norm whose square is beyond float64 counts as infinite
    assert length == (pytest.approx(0.1) if size < 1e154 else 0.0)
    batch[0][1] = math.inf
    assert step(state, batch)[1].found_inf == 1


def test_a_gradient_that_overflows_by_unscaling_is_found() -> None:
    step = make_train_step(linear, SGD, presets.static(2.0**-10))
    _, metrics = step(step.init({"a": torch.zeros(2)}), torch.full((1, 2), 3e38))
    assert metrics.found_inf == 0
    state = step.init({"a": torch.zeros(2)})
    low = state._replace(scaler=state.scaler._replace(scale=torch.tensor(1e-45)))
    batch = torch.full((1, 2), 3e38)
    after, metrics = step(low, batch)
    assert metrics.found_inf == 1
    assert_same(after.params, state.params)


def test_clip_by_value_is_torchs() -> None:
    task = mlp()
    step = build(task, SGD, max_value=0.01)
    state, _ = step(step.init(), task.batch(0))
    model = mlp().model
    task.criterion(model(task.batch(0)[0]), task.batch(0)[1]).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_close(state.params.tree(), dict(model.named_parameters()), 1e-6)


def test_aux_is_no_part_of_the_state() -> None:
    step = make_train_step(loss(lambda p, x: ((p["w"] * x).sum(), p["w"]), has_aux=True), SGD)
    state = step.init({"w": torch.ones(3)})
    _, metrics = step(state, torch.ones(3))
    metrics.aux.zero_()
    assert_same(state.params.tree()["w"], torch.ones(3))


def test_aux_comes_back_and_is_stacked() -> None:
    def loss_fn(params: Any, batch: Tensor) -> Any:
        return (params["w"] * batch).sum(), {"seen": batch.mean(), "row": batch}

    for accumulate, batch in ((1, torch.ones(3)), (2, torch.ones(2, 3))):
        step = make_train_step(loss(loss_fn, has_aux=True), SGD, accumulate=accumulate)
        _, metrics = step(step.init({"w": torch.ones(3)}), batch)
        assert_same(metrics.aux["row"], batch)


def test_buffers_and_aux_together() -> None:
    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Any:
        count = {"count": buffers["count"] + 1}
        return (params["w"] * batch).sum(), (count, {"seen": batch.sum()})

    step = make_train_step(loss(loss_fn, has_aux=True, has_buffers=True), SGD, accumulate=2)
    state, metrics = step(step.init({"w": torch.ones(3)}, {"count": torch.zeros(())}), torch.ones(2, 3))
    assert state.buffers["count"] == 2
    assert_same(metrics.aux["seen"], torch.tensor([3.0, 3.0]))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"max_norm": 1.0}], ids=str)
def test_a_function_of_the_flag_decides_for_all_ranks(options: Any, flat: bool, wrapped: bool) -> None:
    elsewhere, flags = torch.tensor(0.0), []

    def of_all(flag: Tensor) -> Tensor:
        flags.append(flag)
        return torch.maximum(flag, elsewhere)

    step = make_train_step(linear, SGD, ScalerConfig(8.0), parallel=of_all, **options)
    run: Any = jit(step, backend="eager", donate=False) if wrapped else step
    state, parts = step.init({"a": torch.ones(2)}, flat=flat), options.get("accumulate", 1)
    for other, here, expected in ((0, 1, 0), (1, 1, 1), (0, math.inf, 1), (1, math.inf, 1), (0, 1, 0)):
        elsewhere.fill_(other)
        flags.clear()
        batch = torch.tensor([[1.0, here]])
        after, metrics = run(state, torch.stack([batch] * parts) if parts > 1 else batch)
        assert metrics.found_inf == expected
        assert torch.equal(after.params["a"], state.params["a"]) == bool(expected)
        assert after.scaler.scale == state.scaler.scale * (0.5 if expected else 1.0)
        if not wrapped:
            assert_same(flags, [torch.tensor(float(here == math.inf))])
        state = after
    assert state.skipped == 3


def test_a_function_of_the_flag_may_take_a_step_that_overflowed() -> None:
    step = make_train_step(linear, SGD, parallel=torch.zeros_like)
    after, metrics = step(step.init({"a": torch.ones(2)}), torch.tensor([[1.0, math.inf]]))
    assert metrics.found_inf == metrics.skipped == 0
    assert_same(after.params["a"], torch.tensor([0.9, -math.inf]))


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        (lambda flag: 1.0, TypeError, r"step: parallel must return a tensor of shape \(\); got 1.0"),
        (lambda flag: flag[None], ValueError, r"step: parallel must return a tensor of shape \(\); got \(1,\)"),
    ],
)
def test_a_function_of_the_flag_returns_a_flag(told: Any, error: type[Exception], message: str) -> None:
    step = make_train_step(linear, SGD, parallel=told)
    with pytest.raises(error, match=message):
        step(step.init({"a": torch.ones(2)}), torch.ones(1, 2))


@pytest.mark.parametrize("flat", [True, False])
def test_muon_for_matrices_adamw_for_vectors(flat: bool) -> None:
    task = mlp()
    optimizer = by_group({"matrix": stateless(torch.optim.Muon, lr=0.01), "vector": ADAMW})
    step = build(task, optimizer)
    state, _ = step(step.init(flat=flat), task.batch(0))
    model = mlp().model
    task.criterion(model(task.batch(0)[0]), task.batch(0)[1]).backward()
    torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01).step()
    torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2).step()
    params = state.params.tree()
    assert_close(params, dict(model.named_parameters()), 1e-6)


def test_any_object_with_init_and_update_is_an_optimizer() -> None:
    class Plain:
        def init(self, params: Any) -> Any:
            return {"count": torch.zeros(())}

        def update(self, params: Any, grads: Any, state: Any) -> Any:
            new = torch.utils._pytree.tree_map(lambda p, g: p - 0.1 * g, params, grads)
            return new, {"count": state["count"] + 1}

    task = mlp()
    steps = [build(task, optimizer) for optimizer in (Plain(), SGD)]
    states = [step(step.init(), task.batch(0))[0] for step in steps]
    assert_close(states[0].params, states[1].params, 1e-6)
    assert states[0].opt_state["count"] == 1


def test_other_trees_of_parameters() -> None:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        (w, _), inner = params
        loss: Tensor = ((batch @ w) * inner["s"]).float().square().mean()
        return loss

    params = ((torch.randn(4, 3), None), {"s": torch.tensor(2.0)})
    results = []
    for flat in (True, False):
        step = make_train_step(loss_fn, ADAMW, policy="bfloat16")
        state, _ = step(step.init(params, flat=flat), torch.ones(2, 4))
        results.append(state.params.tree())
    assert_same(results[0], results[1])


def test_a_flat_tree_and_a_module_with_frozen_parts() -> None:
    task = mlp()
    task.model.get_submodule("0").requires_grad_(False)
    step = build(task)
    state, _ = step(step.init(), task.batch(0))
    assert not any(name.startswith("0.") for name in state.params.tree())
    assert isinstance(state.params, Params)
    assert_same(step.init(state.params).params, state.params)


def test_the_state_shares_nothing() -> None:
    task = cnn()
    before = clone(values_of(task.model))
    for flat in (True, False):
        step = build(task, ADAMW, policy="float16", ema_decay=0.9)
        state = step.init(flat=flat)
        pointers = [leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(state)]
        assert len(pointers) == len(set(pointers)), "two leaves of a state must not share storage: it may be donated"
        for leaf in torch.utils._pytree.tree_leaves(state):
            leaf.fill_(0)
    assert_same(values_of(task.model), before)


@pytest.mark.compiled
def test_steady_loop_compiles_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    task = mlp()
    counter = CompileCounterWithBackend("aot_eager")
    step = build(task, ADAMW, policy="float16", max_norm=1.0, ema_decay=0.9)
    run = torch.compile(step, fullgraph=True, backend=counter)
    state = step.init()
    for index in range(4):
        state, metrics = run(state, task.batch(index))
        step(state, task.batch(index))  # what the eager step keeps for its next call must be no reason to compile
    assert counter.frame_count == 1
    assert isinstance(state, TrainState)
    assert isinstance(metrics, Metrics)


@pytest.mark.parametrize("flat", [True, False])
def test_nothing_is_read_on_the_host(flat: bool) -> None:
    task = mlp()
    step = build(task, ADAMW, policy=None, max_norm=1.0, ema_decay=0.9, accumulate=2)
    batch = torch.stack([task.batch(0)[0]] * 2), torch.stack([task.batch(0)[1]] * 2)
    graph = make_fx(lambda state, batch: step(state, batch))(to(step.init(flat=flat), "meta"), to(batch, "meta"))
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            assert value.device.type == "meta", node


def test_metrics_say_what_happened() -> None:
    step = make_train_step(linear, SGD, ScalerConfig(8.0))
    state = step.init({"a": torch.zeros(2)})
    _, metrics = step(state, torch.tensor([[3.0, 4.0]]))
    zero, count, rate = torch.tensor(0.0), torch.tensor(0), torch.tensor(0.1)
    scalars = (zero, torch.tensor(5.0), torch.tensor(8.0), rate, zero, zero, zero, count + 1, count, count)
    expected: Any = (*scalars, {}, {}, ())
    assert_same(tuple(metrics), expected)


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


@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
def test_scale_backs_off_to_min_scale_and_follows_torch_above_it(wrapped: bool) -> None:
    step = make_train_step(linear, SGD, ScalerConfig(16.0, min_scale=3.0, growth_interval=2))
    run: Any = jit(step, backend="eager") if wrapped else step
    state, kernel = step.init({"a": torch.zeros(2)}), TorchRule(state_of(16.0), interval=2)
    scales = []
    for overflows in (True, True, True, True, False, False, True, True):
        state, _ = run(state, torch.tensor([[3.0, torch.inf if overflows else 4.0]]))
        kernel.update(float(overflows))
        kernel.state.scale.clamp_(min=3.0)
        assert_same(state.scaler, kernel.state)
        scales.append(state.scaler.scale.item())
    assert scales == [8, 4, 3, 3, 3, 6, 3, 3]


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("consume", [False, True])
def test_state_made_under_inference_mode_is_an_ordinary_one(wrapped: bool, policy: str | None, consume: bool) -> None:
    """No step outside it could differentiate an inference tensor."""
    task, ends = cnn(), []
    for mode in (False, True):
        model = copy.deepcopy(task.model)
        adamw = stateless(torch.optim.AdamW, lr=0.01)
        step = make_train_step(module_loss(model, task.criterion), adamw, policy=policy, ema_decay=0.5)
        with torch.inference_mode(mode):
            state = step.init(consume=consume)
            state = step.load_state_dict(step.state_dict(state), like=state)
        assert not any(leaf.is_inference() for leaf in torch.utils._pytree.tree_leaves(state))
        assert not any(value.is_inference() for value in (*model.parameters(), *model.buffers()))
        run: Any = jit(step, backend="eager") if wrapped else step
        for index in range(2):
            state, metrics = run(state, task.batch(index))
        ends.append((clone(state), metrics.loss))
    assert_same(*ends)
