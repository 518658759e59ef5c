"""A gradient inside a loss: it is scaled and unscaled, and what goes wrong without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import funcamp
from tests.recipes import example, values
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import eager

RECIPE = example("gradient_penalty")


def norm_at(scale: float, size: float = 1.0, *, inner_is_scaled: bool = True) -> Tensor:
    """The norm of a loss's gradient at a scale; the loss's own size is a factor."""
    model, (x, y) = RECIPE.make_model(), RECIPE.batch(0, "cpu")

    def loss_fn(params: dict[str, Tensor]) -> Any:
        with torch.autocast("cpu", torch.float16):
            return RECIPE.criterion(functional_call(model, params, x), y) * size

    params = {name: value.detach() for name, value in model.named_parameters()}
    if inner_is_scaled:
        scaler = funcamp.init(funcamp.ScalerConfig(init_scale=scale))
        grads = funcamp.scaled_grad_and_value(loss_fn)(scaler, params)[0][0]
    else:
        grads = torch.func.grad(loss_fn)(params)
    return torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()


def test_norm_is_float32s_whatever_the_scale_and_is_flushed_to_zero_without_one() -> None:
    expected = torch.tensor(RECIPE.float32_norm(0, "cpu"))
    for scale in (2.0**6, 2.0**12):
        assert_close(norm_at(scale), expected, 2.0**-10)
    size = 2.0**-28
    assert_close(norm_at(2.0**32, size), expected * size, 2.0**-10)
    assert norm_at(2.0**32, size, inner_is_scaled=False) < expected * size / 10


def test_inner_gradient_that_overflows_skips_the_step() -> None:
    params, history = RECIPE.train(3, eager)
    assert all(metrics.found_inf for metrics in history)
    assert torch.isfinite(history[0].aux[0])
    assert not torch.isfinite(history[0].aux[1])
    assert_same(params, values(RECIPE.make_model()))
