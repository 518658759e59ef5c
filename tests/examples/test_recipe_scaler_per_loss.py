"""A scale for each loss: what one scale for both would lose to float16."""

from __future__ import annotations

from typing import Any

import torch

import funcamp
from tests.recipes import example
from tests.support.helpers import difference

recipe = example("scaler_per_loss")


def auxiliary_gradients(scale: float, dtype: torch.dtype = torch.float16) -> Any:
    """The gradients of the auxiliary loss, unscaled, of a pass in dtype."""
    torch.manual_seed(0)
    model = recipe.Model()

    @funcamp.scaled_grad_and_value
    def graded(params: Any, batch: Any) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return torch.func.functional_call(model, params, batch)[1]

    state = funcamp.init(funcamp.ScalerConfig(init_scale=scale))
    (grads, state), _ = graded(state, funcamp.clone(dict(model.named_parameters())), recipe.batch(0, "cpu"))
    assert state.found_inf == 0
    return {name: grad for name, grad in grads.items() if not name.startswith("main")}


def test_auxiliary_gradients_vanish_under_the_scale_of_the_main_loss() -> None:
    expected = auxiliary_gradients(1.0, torch.float32)
    own, shared = auxiliary_gradients(2.0**36), auxiliary_gradients(2.0**2)
    assert difference(own, expected) < 1e-3
    assert difference(shared, expected) > 0.3
