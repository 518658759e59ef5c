"""Convolutions in compiled steps on a CPU: other formulas than eager mode's, the same numbers up to rounding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, _upstream, jit, make_train_step, module_loss, stateless
from funcamp._cpu import convolutions
from funcamp._jit.passes.table import Table
from tests.support.helpers import assert_close, assert_same

OP = torch.ops.aten.convolution_backward.default

#: Dimensions, channels, results, groups, kernel, stride, padding, dilation, transposed.
DEPTHWISE: dict[str, tuple[Any, ...]] = {
    "7x7": (2, 6, 6, 6, [7, 7], [1, 1], [3, 3], [1, 1], False),
    "5x3, strides, no padding": (2, 6, 6, 6, [5, 3], [2, 3], [0, 1], [1, 1], False),
    "3-d": (3, 4, 4, 4, [3, 3, 3], [1, 1, 2], [1, 1, 1], [1, 1, 1], False),
}
STRIDED = {"3x3, strides": (2, 6, 6, 6, [3, 3], [2, 2], [1, 1], [1, 1], False)}
OTHERS = {
    "dense": (2, 4, 6, 1, [5, 5], [1, 1], [2, 2], [1, 1], False),
    "groups": (2, 4, 8, 2, [5, 5], [2, 2], [2, 2], [1, 1], False),
    "3x3": (2, 6, 6, 6, [3, 3], [1, 1], [1, 1], [1, 1], False),
    "transposed": (2, 6, 6, 6, [5, 5], [2, 2], [2, 2], [1, 1], True),
}
ALL = {**DEPTHWISE, **STRIDED, **OTHERS}


def arguments(name: str, dtype: torch.dtype, layout: torch.memory_format, images: int = 3) -> list[Any]:
    dims, channels, results, groups, kernel, *geometry, transposed = ALL[name]
    torch.manual_seed(0)
    x = torch.randn(images, channels, *[11, 13, 9][:dims]).to(dtype)
    shape = (channels, results // groups) if transposed else (results, channels // groups)
    weight = torch.randn(*shape, *kernel).to(dtype)
    rest = [*geometry, transposed, [0] * dims, groups]
    grad = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *rest))
    if dims == 2:
        x, grad = x.contiguous(memory_format=layout), grad.contiguous(memory_format=layout)
    return [grad, x, weight, [results], *rest]


LAYOUTS = [torch.contiguous_format, torch.channels_last]


#: What is computed by other formulas than torch's on a processor without arithmetic in float16. On torch 2.11 no loops.
LOOPS = set() if _upstream.LOST_ORDER else {*DEPTHWISE}
OTHERWISE = {torch.float32: LOOPS, torch.bfloat16: LOOPS | {*ALL} - {"7x7", *OTHERS}, torch.float16: {*ALL}}


@pytest.mark.parametrize("images", [3, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_torchs(name: str, dtype: torch.dtype, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_MANY_CHANNELS", 4)
    monkeypatch.setattr(convolutions, "_has_half", lambda: False)
    for layout in LAYOUTS:
        given = arguments(name, dtype, layout, images)
        exact = [value.double() if isinstance(value, Tensor) else value for value in given]
        for mask in itertools.product([True, False], repeat=3):
            found = Table((convolutions.convolutions,), False)[OP](*given, list(mask))
            assert not all(mask) or (found is not NotImplemented) == (name in OTHERWISE[dtype])
            if found is NotImplemented:
                continue
            wanted = OP(*exact, list(mask))
            assert [value is not None for value in found] == list(mask)
            for value, other in zip(found, wanted):
                if value is not None:
                    assert value.dtype == dtype
                    assert_close(value.double(), other, {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 8e-3))


@pytest.mark.thorough
@pytest.mark.inductor
def test_float16_follows_the_eager_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.ConvTranspose2d(32, 32, 2)),
        *(nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Flatten(2), nn.Conv1d(32, 32, 4, groups=32)),
        *(nn.Flatten(), nn.Linear(416, 4)),
    )
    sgd = stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
    loss_fn = module_loss(model, nn.functional.cross_entropy, keep_buffers=True)
    step = make_train_step(loss_fn, sgd, ScalerConfig(init_scale=2.0**20, growth_interval=3), policy="float16")
    batch = torch.randn(2, 4, 8, 8), torch.tensor([0, 3])
    run, state, expected = jit(step, exact=True), step.init(), step.init()
    for _ in range(30):
        state, metrics = run(state, batch)
        expected, wanted = step(expected, batch)
        assert_same((metrics.found_inf, state.scaler.scale), (wanted.found_inf, expected.scaler.scale))
    assert 2 <= state.skipped < 25
    assert_close((state.params, state.buffers), (expected.params, expected.buffers), 2.0**-6)
