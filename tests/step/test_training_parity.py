"""Training with funcamp equals training with torch.amp.GradScaler: scales and skips at every step, then parameters.

The eager loop is torch's documented one. Tolerances are relative to the norm of a parameter: 1e-6 in float32, where
a compiler may round AdamW's arithmetic elsewhere; 1e-5 in float16, where one such rounding can move a float16 weight.
SGD must be bit-equal in float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from funcamp import (
    ScalerConfig,
    clip_grad_norm,
    init,
    scaled_grad_and_value,
    skip_step,
    stateless,
    unscale_and_check,
    update,
)
from tests.support.helpers import assert_close, assert_same

STEPS = 50
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}


def mlp() -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return model, batches((16, 8))


def cnn() -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4))
    return model, batches((4, 2, 7, 7))


def batches(shape: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(shape, generator=generator), torch.randint(4, shape[:1], generator=generator)

    return batch


def poison(step: int, grad: Tensor) -> Tensor:
    """A non-finite value in the gradient of some steps, where float32 would never overflow by itself."""
    bad = {5: math.inf, 6: math.nan, 17: -math.inf, 30: math.nan}.get(step)
    return grad if bad is None else torch.where(torch.arange(grad.numel()).reshape(grad.shape) == 0, bad, grad)


def torch_loop(
    model: nn.Module, batch: Any, config: ScalerConfig, cls: Any, arguments: Any, half: bool, clip: bool
) -> Any:
    scaler = torch.amp.GradScaler(
        "cpu", config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval
    )
    optimizer = cls(model.parameters(), **arguments)
    trace = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if half else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        if not half:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = poison(step, parameter.grad)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale(), scaler.get_scale() < before))
    return trace, {name: value.detach() for name, value in model.named_parameters()}


def funcamp_loop(
    model: nn.Module, batch: Any, config: ScalerConfig, cls: Any, arguments: Any, half: bool, clip: bool
) -> Any:
    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16) if half else contextlib.nullcontext():
            return nn.functional.cross_entropy(functional_call(model, params, x).float(), y)

    optimizer = stateless(cls, **arguments)
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    opt_state, state = optimizer.init(params), init(config)
    trace = []
    for step in range(STEPS):
        x, y = batch(step)
        if half:
            (grads, state), loss = scaled_grad_and_value(loss_fn)(state, params, x, y)
        else:  # the same step by hand, to poison the scaled gradients as the other loop does
            scaled, loss = torch.func.grad_and_value(lambda p, x=x, y=y, s=state: loss_fn(p, x, y) * s.scale)(params)
            loss = loss / state.scale
            grads, state = unscale_and_check(state, {name: poison(step, grad) for name, grad in scaled.items()})
        if clip:
            grads, _ = clip_grad_norm(grads, 0.5)
        new = optimizer.update(params, grads, opt_state)
        old = (params, opt_state)
        params, opt_state = skip_step(state, new=new, old=old)
        skipped = bool(state.found_inf)
        if skipped:
            assert_same((params, opt_state), old)
        state = update(state, config)
        trace.append((loss.item(), state.scale.item(), skipped))
    return trace, params


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("half", [True, False], ids=["float16", "float32"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_training_follows_grad_scaler(make: Any, name: str, half: bool, clip: bool) -> None:
    # 2**20 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
    config = ScalerConfig(init_scale=2.0**20, growth_interval=4)
    cls, arguments = CLASSES[name]
    model, batch = make()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trace, params = funcamp_loop(model, batch, config, cls, arguments, half, clip)
    model.load_state_dict(start)
    expected_trace, expected = torch_loop(model, batch, config, cls, arguments, half, clip)
    assert [row[1:] for row in trace] == [row[1:] for row in expected_trace]
    assert sum(row[2] for row in trace) >= 4
    assert_close(params, expected, 1e-5 if half else 1e-6)
    if name == "SGD" and not half:
        assert_same(params, expected)
    for (loss, *_), (expected_loss, *_) in zip(trace, expected_trace):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
