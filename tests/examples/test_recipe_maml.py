"""A step differentiated through, under one scale, over tasks side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import mse_loss

import funcamp
from tests.recipes import example, oracle, trace_of
from tests.support.helpers import assert_close, assert_same
from tests.support.models import with_two_roundings
from tests.support.steps import eager

RECIPE = example("maml")
second_order = funcamp.scaled_grad_and_value


pytestmark = pytest.mark.usefixtures("one_thread")


def test_difference_to_the_loop_is_where_vmap_adds_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECIPE, "make_model", with_two_roundings(RECIPE.make_model))
    params, history = RECIPE.train(40, eager)
    expected, trace = oracle("maml").oracle(RECIPE, 40, "cpu")
    assert trace_of(history) == trace
    assert_same(params, expected)


def float32_gradient(params: dict[str, Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model = RECIPE.make_model()
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    losses = []
    for support_x, support_y, query_x, query_y in zip(*batch):
        loss = mse_loss(functional_call(model, leaves, support_x), support_y)
        grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        fast = {name: p - RECIPE.INNER_LR * grad for (name, p), grad in zip(leaves.items(), grads)}
        losses.append(mse_loss(functional_call(model, fast, query_x), query_y))
    return dict(zip(leaves, torch.autograd.grad(torch.stack(losses).mean(), list(leaves.values()))))


@pytest.mark.parametrize("scale", [2.0**4, 2.0**12])
def test_gradient_is_float32s_whatever_the_scale(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(RECIPE, "CONFIG", funcamp.ScalerConfig(init_scale=scale))
    start = {name: value.detach() for name, value in RECIPE.make_model().named_parameters()}
    params, (metrics,) = RECIPE.train(1, eager)
    assert metrics.found_inf == 0
    expected = float32_gradient(start, RECIPE.batch(0, "cpu"))
    assert_close({name: (start[name] - params[name]) / RECIPE.LR for name in start}, expected, 2.0**-7)


def first_order(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    make = second_order(loss_fn)

    def detached(*args: Any) -> Any:
        (grads, state), loss = make(*args)
        return ({name: grad.detach() for name, grad in grads.items()}, state), loss

    return detached


def test_second_order_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = RECIPE.train(12, eager)
    monkeypatch.setattr(RECIPE.funcamp, "scaled_grad_and_value", first_order)
    with pytest.raises(AssertionError, match="differs"):
        assert_close(RECIPE.train(12, eager)[0], whole, 2.0**-9)


def test_task_that_overflows_skips_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    make = RECIPE.batch
    monkeypatch.setattr(RECIPE, "CONFIG", funcamp.ScalerConfig(init_scale=2.0**8))

    def batch(index: int, device: str) -> Any:
        support_x, support_y, *query = make(index, device)
        return support_x, torch.cat([support_y[:1] * 1e6, support_y[1:]]), *query

    start = {name: value.detach() for name, value in RECIPE.make_model().named_parameters()}
    assert RECIPE.train(1, eager)[1][0].found_inf == 0
    monkeypatch.setattr(RECIPE, "batch", batch)
    params, (metrics,) = RECIPE.train(1, eager)
    assert metrics.found_inf == 1
    assert_same(params, start)
