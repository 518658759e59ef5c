"""`scaled_grad_and_value` against torch.func.grad_and_value on the scaled loss, and against backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcamp import scaled_grad_and_value
from tests.conftest import Transform
from tests.helpers import assert_same
from tests.oracle import state_of


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"][0] + params["b"]).square().mean()


def example() -> tuple[dict[str, Any], Tensor]:
    return {"w": [torch.randn(4, 3)], "b": torch.randn(3)}, torch.randn(5, 4)


def test_power_of_two_scale_gives_the_unscaled_gradient(transform: Transform) -> None:
    params, x = example()
    expected, loss = torch.func.grad_and_value(loss_fn)(params, x)
    (grads, state), value = transform(scaled_grad_and_value(loss_fn))(state_of(2.0**10), params, x)
    assert_same(state, state_of(2.0**10))
    torch.testing.assert_close((grads, value), (expected, loss), rtol=1e-6, atol=1e-7)


def test_eager_power_of_two_scale_is_bit_equal_to_backward() -> None:
    params, x = example()
    leaves = {"w": [params["w"][0].clone().requires_grad_()], "b": params["b"].clone().requires_grad_()}
    loss = loss_fn(leaves, x)
    loss.backward()
    (grads, _), value = scaled_grad_and_value(loss_fn)(state_of(2.0**10), params, x)
    assert_same((grads, value), ({"w": [leaves["w"][0].grad], "b": leaves["b"].grad}, loss.detach()))


def test_loss_comes_back_as_the_loss_function_gave_it() -> None:
    _, loss = scaled_grad_and_value(lambda w: (w * 3e38).half().sum() * 0 + w.half())(
        state_of(2.0**16), torch.tensor(1.0)
    )
    assert loss.dtype == torch.float16


def test_aux_tensors_come_back(transform: Transform) -> None:
    params, x = example()

    def with_aux(params: Any, x: Tensor) -> Any:
        loss = loss_fn(params, x)
        return loss, {"hidden": x @ params["w"][0], "loss": loss}

    (grads, _), (loss, aux) = transform(scaled_grad_and_value(with_aux, has_aux=True))(state_of(8.0), params, x)
    assert_same(aux["loss"], loss)
    torch.testing.assert_close(aux["hidden"], x @ params["w"][0])
    assert not aux["hidden"].requires_grad
    assert grads["b"].shape == (3,)


def test_none_leaves_of_params_have_none_gradients() -> None:
    (grads, _), _ = scaled_grad_and_value(lambda p: p["w"].sum())(state_of(8.0), {"w": torch.ones(2), "none": None})
    assert_same(grads, {"w": torch.ones(2), "none": None})


def test_float16_overflow_of_the_scaled_gradient_sets_the_flag() -> None:
    def half_loss(w: Tensor) -> Tensor:
        return (w.half() * torch.tensor(4.0, dtype=torch.float16)).float().sum()

    run = scaled_grad_and_value(half_loss)
    assert run(state_of(2.0**10), torch.ones(3))[0][1].found_inf == 0.0
    (_, state), loss = run(state_of(2.0**15), torch.ones(3))
    assert_same(state, state_of(2.0**15, found_inf=1.0))
    assert loss == 12.0


def test_gradients_are_unscaled_with_the_scale_that_multiplied_the_loss() -> None:
    (grads, state), _ = scaled_grad_and_value(lambda w: w.sum())(state_of(8.0, tracker=1999), torch.ones(2))
    assert grads.tolist() == [1.0, 1.0]
    assert_same(state, state_of(8.0, tracker=1999))


def test_keyword_arguments_reach_the_loss_function() -> None:
    (grads, _), _ = scaled_grad_and_value(lambda w, *, factor: (w * factor).sum())(
        state_of(8.0), torch.ones(2), factor=3.0
    )
    assert grads.tolist() == [3.0, 3.0]


def test_inside_grad_a_second_derivative_is_right() -> None:
    def inner(w: Tensor) -> Tensor:
        (grads, _), _ = scaled_grad_and_value(lambda w: (w**3).sum())(state_of(8.0), w)
        return torch.as_tensor(grads.sum())

    assert torch.func.grad(inner)(torch.tensor([2.0])).item() == 12.0


def test_non_finite_loss_sets_the_flag() -> None:
    (_, state), loss = scaled_grad_and_value(lambda w: (w * math.inf).sum())(state_of(8.0), torch.ones(2))
    assert state.found_inf == 1.0
    assert torch.isinf(loss)
