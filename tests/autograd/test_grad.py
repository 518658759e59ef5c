"""`scaled_grad_and_value` against torch.func.grad_and_value on the scaled loss, and against backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from funcamp import scaled_grad_and_value
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import state_of
from tests.support.steps import eager_and_traced
from tests.support.torch_loop import assert_as_torchs_loop


def loss_fn(params: Any, x: Tensor, factor: float = 1.0) -> Tensor:
    return torch.tanh(x @ params["w"][0] + params["b"]).square().mean() * factor


def with_aux(params: Any, x: Tensor) -> Any:
    loss = loss_fn(params, x)
    return loss, {"hidden": x @ params["w"][0], "loss": loss}


def example() -> tuple[dict[str, Any], Tensor]:
    return {"w": [torch.randn(4, 3)], "b": torch.randn(3)}, torch.randn(5, 4)


@pytest.mark.compiled
def test_gradients_loss_and_aux_are_those_of_torch(transform: Transform) -> None:
    params, x = example()
    expected, (loss, aux) = torch.func.grad_and_value(with_aux, has_aux=True)(params, x)
    state = state_of(2.0**10, tracker=1999)
    (grads, found), results = transform(scaled_grad_and_value(with_aux, has_aux=True))(state, params, x)
    assert_same(found, state)
    torch.testing.assert_close((grads, results), (expected, (loss, aux)), rtol=1e-6, atol=1e-7)


def test_eager_gradients_are_bit_equal_to_backward() -> None:
    params, x = example()
    leaves = {"w": [params["w"][0].clone().requires_grad_()], "b": params["b"].clone().requires_grad_()}
    loss = loss_fn(leaves, x, 3.0)
    loss.backward()
    params, expected = {**params, "none": None}, {"w": [leaves["w"][0].grad], "b": leaves["b"].grad, "none": None}
    (grads, _), value = scaled_grad_and_value(loss_fn)(state_of(2.0**10), params, x, factor=3.0)
    assert_same((grads, value), (expected, loss.detach()))


def in_float16(w: Tensor) -> Tensor:
    return (w.half() * torch.tensor(4.0, dtype=torch.float16)).sum().float()


@pytest.mark.parametrize(
    ("loss", "scale", "found_inf", "value"),
    [
        (in_float16, 2.0**10, 0.0, torch.tensor(12.0)),
        (in_float16, 2.0**15, 1.0, torch.tensor(12.0)),
        (lambda w: (w * math.inf).sum(), 8.0, 1.0, torch.tensor(math.inf)),
        (lambda w: w.half().sum(), 2.0**16, 1.0, torch.tensor(3.0, dtype=torch.float16)),
    ],
)
def test_an_overflow_sets_the_flag_and_the_loss_is_that_of_the_function(
    loss: Callable[[Tensor], Tensor], scale: float, found_inf: float, value: Tensor
) -> None:
    (_, state), found = scaled_grad_and_value(loss)(state_of(scale), torch.ones(3))
    assert_same((state, found), (state_of(scale, found_inf=found_inf), value))


class Penalty(nn.Module):
    """Its output, and how that changes with its input; or its output, computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.body, self.again = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), again

    def forward(self, x: Tensor) -> Any:
        if self.again:
            return checkpoint(self.body, x, use_reentrant=False)
        y = self.body(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum(1, keepdim=True)


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize(("again", "policy"), [(False, None), (False, "bfloat16"), (True, None)])
def test_a_batch_may_require_a_gradient(again: bool, policy: str | None, wrap: Any) -> None:
    """`x.requires_grad_()` and torch.autograd.grad in the forward pass, as gradient penalties are written."""
    batches = [(torch.randn(5, 3, requires_grad=True), torch.randn(5, 1)) for _ in range(3)]
    assert_as_torchs_loop(lambda: (Penalty(again), mse_loss), batches, wrap, policy=policy)


@pytest.mark.parametrize(
    ("engine", "detached", "expected"),
    [(None, False, True), ("func", False, True), ("autograd", False, False), (None, True, False)],
)
def test_results_require_a_gradient_if_torch_func_gets_a_modules_parameters(
    engine: Any, detached: bool, expected: bool
) -> None:
    module = nn.Linear(3, 1)
    params = {name: value.detach() if detached else value for name, value in module.named_parameters()}
    grad_fn = scaled_grad_and_value(
        lambda params, x: torch.func.functional_call(module, params, x).square().mean(), engine=engine
    )
    (grads, _), loss = grad_fn(state_of(8.0), params, torch.ones(4, 3))
    assert {loss.requires_grad, grads["weight"].requires_grad, grads["bias"].requires_grad} == {expected}
