"""Options of a step: the scaler in the loss, and the parameters as the loss sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import ScalerConfig, ScalerState, jit, make_train_step, module_loss, scale, stateless, unscale
from tests.helpers import assert_same, clone
from tests.models import cnn, tied

SGD = stateless(torch.optim.SGD, lr=0.5)
CONFIG = ScalerConfig(2.0**10)


def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum()


def with_scaler(params: dict[str, Tensor], scaler: ScalerState, x: Tensor) -> Any:
    # times the scale, and back: only the right state gives the same loss
    return unscale(scaler, scale(scaler, plain(params, x))) * (scaler.scale / 2.0**10)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_has_scaler_passes_the_state_that_scales(accumulate: int, compiled: bool) -> None:
    params = {"w": torch.tensor([1.0, 2.0, 3.0])}
    x = torch.ones(2, 3) if accumulate > 1 else torch.ones(3)
    results = []
    for loss, has_scaler in ((plain, False), (with_scaler, True)):
        step: Any = make_train_step(loss, SGD, CONFIG, has_scaler=has_scaler, accumulate=accumulate)
        state = step.init(params)
        assert step.loss(state, x if accumulate == 1 else x[0]) == 14.0
        results.append((jit(step, backend="aot_eager") if compiled else step)(state, x))
    assert_same(results[1], results[0])


def test_has_scaler_comes_after_buffers() -> None:
    seen = []

    def loss(params: Any, buffers: Any, scaler: Any, batch: Any) -> Any:
        seen.append((set(params), set(buffers), type(scaler), batch.shape))
        return plain(params, batch) * buffers["b"], buffers

    step = make_train_step(loss, SGD, CONFIG, has_scaler=True, has_buffers=True)
    step(step.init({"w": torch.ones(3)}, {"b": torch.ones(())}), torch.ones(3))
    assert seen == [({"w"}, {"b"}, ScalerState, (3,))]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("make", [cnn, tied])
def test_compute_params_are_what_the_loss_sees(make: Any, policy: Any, flat: bool) -> None:
    task = make()
    inner = module_loss(task.model, task.criterion)
    seen = []

    class See(type(inner)):  # type: ignore[misc]  # ModuleLoss, whose names the policy asks for
        def __call__(self, params: Any, *rest: Any) -> Any:
            seen.append(params)
            return super().__call__(params, *rest)

    step = make_train_step(See(task.model, task.criterion), SGD, CONFIG, policy=policy, flat=flat)
    state = step.init()
    found = step.compute_params(state)
    step.loss(state, task.batch(0))
    assert_same(clone(found), clone(seen[0]))
    assert any(leaf.dtype == torch.float16 for leaf in found.values()) == (policy is not None)
    assert not any(leaf.requires_grad for leaf in found.values())
