"""A policy is the dtype of autocast around a loss, which gets the parameters of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import Policy, ScalerConfig, make_train_step
from tests.support.steps import SGD


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_policy_is_a_text_a_dtype_or_an_object_and_casts_at_the_use(dtype: torch.dtype) -> None:
    name, seen = str(dtype).removeprefix("torch."), {}

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        product = batch @ params["w"]
        seen.update({name: value.dtype for name, value in {**params, "product": product}.items()})
        loss: Tensor = (product + params["b"]).float().square().mean()
        return loss

    params = {"w": torch.randn(4, 4), "b": torch.zeros(4), "double": torch.zeros(2, 2, dtype=torch.float64)}
    for policy in (name, dtype, Policy(dtype)):
        step = make_train_step(loss_fn, SGD, ScalerConfig(256.0), policy=policy)
        assert repr(step).endswith(f"policy={name})")
        for flat in (True, False):
            step(step.init(params, flat=flat), torch.randn(2, 4))
            assert seen == {"w": torch.float32, "b": torch.float32, "double": torch.float64, "product": dtype}
