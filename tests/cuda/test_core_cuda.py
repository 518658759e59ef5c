"""On a GPU: torch's kernels as oracle, no sync in a step, and a whole step captured into one CUDA graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from tests.support.helpers import assert_close, assert_no_sync, assert_same, clone, to
from tests.support.oracle import TorchRule, state_of

pytestmark = pytest.mark.cuda


CONFIG = funcamp.ScalerConfig(init_scale=2.0**20, growth_interval=4)


def train_step(optimizer: Any, state: Any, batch: Tensor) -> Any:
    params, opt_state, scaler = state

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            hidden = torch.tanh(x @ params["a"])
            out: Tensor = hidden @ params["b"]
            return out.float().square().mean()

    (grads, scaler), loss = funcamp.scaled_grad_and_value(loss_fn)(scaler, params, batch)
    grads, norm = funcamp.clip_grad_norm(grads, 1.0)
    new = optimizer.update(params, grads, opt_state)
    params, opt_state = funcamp.skip_step(scaler, new=new, old=(params, opt_state))
    found_inf = scaler.found_inf
    return (params, opt_state, funcamp.update(scaler, CONFIG)), (loss, norm, found_inf)


def example() -> tuple[Any, Any, Tensor]:
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=lambda applied: 1e-2 / (1 + applied / 10))
    torch.manual_seed(0)
    params = {"a": torch.randn(16, 32, device="cuda"), "b": torch.randn(32, 8, device="cuda")}
    state = (params, optimizer.init(params), funcamp.init(CONFIG, device="cuda"))
    return optimizer, state, torch.randn(64, 16, device="cuda")


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


def test_eager_and_compiled_steps_do_not_sync() -> None:
    optimizer, state, batch = example()
    compiled = torch.compile(lambda s, b: train_step(optimizer, s, b), fullgraph=True)
    compiled(state, batch)
    train_step(optimizer, state, batch)  # the first calls load kernels and set up cuBLAS
    with assert_no_sync():
        for _ in range(3):
            train_step(optimizer, state, batch)
            compiled(state, batch)


def test_captured_step_follows_the_eager_one_through_skips_and_growth() -> None:
    optimizer, state, batch = example()
    reference = clone(state)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(optimizer, clone(state), batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    static = clone(state)
    with torch.cuda.graph(graph):
        new, metrics = train_step(optimizer, static, batch)
        flat_new, flat_static = (torch.utils._pytree.tree_leaves(tree) for tree in (new, static))
        for old_leaf, new_leaf in zip(flat_static, [leaf.clone() for leaf in flat_new]):
            old_leaf.copy_(new_leaf)
    found = []
    for _ in range(30):
        reference, (_, _, flag) = train_step(optimizer, reference, batch)
        graph.replay()
        found.append(flag.item())
        assert metrics[2].item() == found[-1]
        assert_same(static[2], reference[2])
        assert_close(static[0], reference[0], 1e-6)
    assert 0.0 in found
    assert 1.0 in found


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
