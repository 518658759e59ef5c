"""Options of a step: what the loss is given, and the parameters, precision and scale as the loss sees them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import ScalerConfig, ScalerState, clone, loss, make_train_step, scale, stateless, unscale
from tests.support.helpers import assert_same
from tests.support.models import mlp
from tests.support.steps import build, eager, eager_and_traced, traced

SGD = stateless(torch.optim.SGD, lr=0.5)
CONFIG = ScalerConfig(2.0**10)


def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum()


# What a loss is given.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_gets_the_scaler_that_scales_it_after_its_buffers(accumulate: int) -> None:
    def with_scaler(params: Any, buffers: Any, scaler: ScalerState, x: Tensor) -> Any:
        # times the scale, and back: only the right state gives the same loss
        return unscale(scaler, scale(scaler, plain(params, x))) * (scaler.scale / 2.0**10), buffers

    x = torch.ones(2, 3) if accumulate > 1 else torch.ones(3)
    results: list[Any] = []
    for described in (loss(plain), loss(with_scaler, has_scaler=True, has_buffers=True)):
        step = make_train_step(described, SGD, CONFIG, accumulate=accumulate)
        state = step.init({"w": torch.tensor([1.0, 2.0, 3.0])}, {"b": torch.ones(())} if results else None)
        assert step.loss(state, torch.ones(3)) == 14.0
        after, metrics = step(state, x)
        results.append((after._replace(buffers={}), metrics))
    assert_same(*results)


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_may_write_its_buffers(in_place: bool, wrap: Any) -> None:
    """A skipped step puts them back, an applied one has them, and the state before is as it was."""

    def written(p: Any, buffers: dict[str, Tensor], x: Tensor) -> Any:
        value = plain(p, x)
        if in_place:
            buffers["n"].mul_(0.5).add_(value.detach(), alpha=0.5)
        else:
            buffers["n"] = buffers["n"] * 0.5 + value.detach() * 0.5
        return value, buffers

    step = make_train_step(loss(written, has_buffers=True), SGD, CONFIG)
    first, run = step.init({"w": torch.ones(3)}, {"n": torch.zeros(())}), wrap(step)
    before = clone(first)
    skipped, metrics = run(clone(first), torch.full((3,), float("nan")))
    assert metrics.found_inf == 1
    assert_same(skipped.buffers, before.buffers)
    after, metrics = run(clone(first), torch.ones(3))
    assert_same(after.buffers["n"], metrics.loss * 0.5)
    step.loss(first, torch.ones(3))
    assert_same(first, before)


@pytest.mark.compiled
@eager_and_traced
def test_kept_buffers_are_no_ones_memory(wrap: Any) -> None:
    """A buffer that is a tensor of the batch, or of the parameters, is a copy: no later step writes into those."""

    def keeping(p: Any, buffers: dict[str, Tensor], x: Tensor) -> Any:
        return plain(p, x) + buffers["last"].sum(), {"last": x, "prev": p["w"].detach()}

    step = make_train_step(loss(keeping, has_buffers=True, keep_buffers=True), SGD, CONFIG)
    x, run = torch.ones(3), wrap(step)
    first = step.init({"w": torch.ones(3)}, {"last": torch.zeros(3), "prev": torch.zeros(3)})
    state, _ = step(first, x)
    for number in range(3):
        state, _ = run(state, x + number)
    assert_same((x, first.params["w"]), (torch.ones(3), torch.ones(3)))
    assert_same(state.buffers["last"], x + 2)


# Its parameters and precision, outside of a step.


@pytest.mark.compiled
@pytest.mark.parametrize("policy", [None, "bfloat16"])
def test_compute_params_are_what_the_loss_sees_and_stay_what_they_were(policy: str | None) -> None:
    seen: dict[str, Any] = {}

    def seeing(params: Any, x: Tensor) -> Tensor:
        seen.setdefault("params", clone(params))
        return plain(params, x)

    step = make_train_step(seeing, SGD, CONFIG, policy=policy)
    state, x = step.init({"w": torch.ones(2, 2)}), torch.ones(2, 2)
    old = step.compute_params(state)
    step.loss(state, x)
    state, _ = traced(step)(state, x)
    assert_same((old, seen["params"]), ({"w": torch.ones(2, 2)},) * 2)
    assert not old["w"].requires_grad
    assert_same(step.compute_params(state)["w"], torch.zeros(2, 2))


@pytest.mark.parametrize("around", [torch.bfloat16, None])
@pytest.mark.parametrize("policy", [None, "float32", "float16", "bfloat16", torch.bfloat16])
def test_a_forward_pass_of_ones_own_computes_as_the_loss_does(policy: Any, around: torch.dtype | None) -> None:
    task, name = mlp(), str(policy or "float32").removeprefix("torch.")
    step = build(task, SGD, policy=policy)
    state, (x, target) = build(task, SGD, policy="float16").init(), task.batch(0)  # a state has no policy
    with nullcontext() if around is None else torch.autocast("cpu", around):
        with step.autocast(state):
            output = torch.func.functional_call(task.model, step.compute_params(state), x)
            found = task.criterion(output, target)
        expected = step.loss(state, (x, target))
    assert_same(found.detach(), expected)
    assert repr(step).endswith(f"policy={name})")
    dtype = around if name == "float32" else getattr(torch, name)
    assert output.dtype == (dtype or torch.float32)


# A torch.autocast region around the call: a policy decides, and without one the region does.


def compiled_whole(step: Any) -> Any:
    """The step under `torch.compile`, in one graph."""
    return torch.compile(step, backend="eager", fullgraph=True)


def in_region(
    region: torch.dtype | None, policy: str | None, wrap: Any = eager, optimizer: Any = SGD, **options: Any
) -> Any:
    """The losses and parameters of two steps."""
    task = mlp()
    step = build(task, optimizer, policy=policy, max_norm=1.0, **options)
    run, state, losses = wrap(step), step.init(), []
    batch: Any = task.batch(0)
    if options:
        batch = tuple(torch.stack([part] * 2) for part in batch)
    for _ in range(2):
        with nullcontext() if region is None else torch.autocast("cpu", region):
            state, metrics = run(state, batch)
            losses.append([metrics.loss, step.loss(state, task.batch(0))])
    return clone(losses), dict(state.params.tree())


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("policy", "region", "wrap", "options"),
    [
        ("float16", torch.bfloat16, eager, {}),
        ("bfloat16", torch.float16, eager, {"accumulate": 2}),
        ("float16", torch.float16, eager, {}),
        ("float16", torch.bfloat16, traced, {}),
        ("float16", torch.bfloat16, compiled_whole, {}),
    ],
    ids=["float16", "micro-batches", "the same", "jit", "compiled"],
)
def test_a_policy_computes_the_same_in_a_region(policy: str, region: torch.dtype, wrap: Any, options: Any) -> None:
    assert_same(in_region(region, policy, wrap, **options), in_region(None, policy, **options))


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [eager, traced, compiled_whole], ids=["eager", "jit", "compiled"])
def test_without_a_policy_the_region_applies_to_the_loss_alone(wrap: Any) -> None:
    # Adafactor multiplies matrices, which autocast would cast.
    optimizer = stateless(torch.optim.Adafactor)
    losses, params = in_region(torch.bfloat16, None, wrap, optimizer)
    assert_same((losses, params), in_region(None, "bfloat16", wrap, optimizer))
    assert losses[0][0] != in_region(None, None)[0][0][0]


def test_the_cache_is_empty_after_a_step() -> None:
    """torch keeps a cast until the region ends, here the caller's: one for each weight of each step."""
    weights, x = [], torch.ones(8, 6)

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        weights.append(params["weight"])
        return torch.mm(x, params["weight"]).float().sum()

    step = make_train_step(loss_fn, SGD, policy="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        step(step.init({"weight": torch.ones(6, 3)}), x)
        with torch.no_grad():
            weights[0].zero_()
        assert torch.mm(x, weights[0]).abs().sum() == 0
