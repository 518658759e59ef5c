"""On a GPU: torch's kernels and its capturable optimizers as oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import funcamp
from tests.support.helpers import assert_same, to
from tests.support.oracle import TorchRule, state_of

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [2.0**16, 3.7e4, torch.finfo(torch.float32).max, 5 * 2.0**-149, 0.0])
def test_update_follows_the_cuda_kernel(scale: float, compiled: bool) -> None:
    config = funcamp.ScalerConfig(growth_factor=1.1, backoff_factor=0.3, growth_interval=2)

    def run(state: Any) -> Any:
        return funcamp.update(state, config)

    update = torch.compile(run, fullgraph=True) if compiled else run
    for tracker in (0, 1, 5):
        for flag in (0.0, 1.0, 2.0, math.nan):
            kernel = TorchRule(to(state_of(scale, tracker), "cuda"), 1.1, 0.3, 2)
            kernel.update(flag)
            assert_same(update(to(state_of(scale, tracker, flag), "cuda")), kernel.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unscale_and_check_follows_the_cuda_kernel(dtype: torch.dtype) -> None:
    for bad in (None, math.inf, math.nan):
        grad = torch.randn(1000, dtype=dtype, device="cuda")
        if bad is not None:
            grad[517] = bad
        expected, found_inf = grad.clone(), torch.zeros((), device="cuda")
        inv_scale = torch.tensor(3.7e4, device="cuda").double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([expected], found_inf, inv_scale)
        actual, state = funcamp.unscale_and_check(to(state_of(3.7e4), "cuda"), grad)
        assert_same((actual, state.found_inf), (expected, found_inf))


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "RAdam", "Adamax"])
def test_optimizer_follows_torchs_capturable_one(name: str) -> None:
    cls: Any = getattr(torch.optim, name)
    own: dict[str, Any] = {} if name == "SGD" else {"capturable": True}
    torch.manual_seed(0)
    params = torch.randn(64, 33, device="cuda")
    leaf = params.clone().requires_grad_()
    eager, optimizer = cls([leaf], lr=0.01, foreach=False, **own), funcamp.stateless(cls, lr=0.01)
    opt_state = optimizer.init(params)
    for _ in range(10):
        grad = torch.randn_like(params)
        leaf.grad = grad.clone()
        eager.step()
        params, opt_state = optimizer.update(params, grad, opt_state)
        assert_same(params, leaf.detach())


def test_state_on_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="must be on the scaler state's type of device, cpu"):
        funcamp.unscale_and_check(funcamp.init(), torch.ones(2, device="cuda"))
