"""Convolutions in compiled steps on a CPU: other formulas than eager mode's, the same numbers up to rounding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcamp import ScalerConfig, _upstream, jit, make_train_step, module_loss, stateless
from funcamp._cpu import convolutions
from funcamp._jit.passes.table import Table
from tests.support.helpers import assert_close

OP = torch.ops.aten.convolution_backward.default
BATCH = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3])

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


@pytest.mark.parametrize("images", [3, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_torchs(name: str, dtype: torch.dtype, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_MANY_CHANNELS", 2)
    for layout in LAYOUTS:
        given = arguments(name, dtype, layout, images)
        exact = [value.double() if isinstance(value, Tensor) else value for value in given]
        for mask in itertools.product([True, False], repeat=3):
            found = Table((convolutions.convolutions,))[OP](*given, list(mask))
            if found is NotImplemented:  # left to torch
                continue
            wanted = OP(*exact, list(mask))
            assert [value is not None for value in found] == list(mask)
            for value, other in zip(found, wanted):
                if value is not None:
                    assert value.dtype == dtype
                    assert_close(value.double(), other, {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 8e-3))


class Calls(TorchDispatchMode):
    """The dtypes of gradients of convolutions, and which of them are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.dtype, list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is OP:
            self.calls.append((args[1].dtype, args[-1]))
        return func(*args, **(kwargs or {}))


BY_INPUT = [True, False, False]


@pytest.mark.parametrize(
    ("name", "many", "dtype", "expected"),
    [
        ("7x7", 6, torch.bfloat16, [] if _upstream.LOST_ORDER else [(torch.bfloat16, BY_INPUT)]),
        ("7x7", 7, torch.bfloat16, []),
        ("7x7", 7, torch.float16, [(torch.float32, [True, True, True])]),
        ("3x3, strides", 7, torch.bfloat16, [(torch.float32, [True, True, True])]),
        ("dense", 7, torch.float16, [(torch.float32, [True, True, True])]),
    ],
)
def test_the_slow_gradients_are_computed_otherwise(
    name: str, many: int, dtype: torch.dtype, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_MANY_CHANNELS", many)
    monkeypatch.setattr(convolutions, "_has_half", lambda: False)  # as on a processor without arithmetic in float16
    with Calls() as calls:
        Table((convolutions.convolutions,))[OP](*arguments(name, dtype, LAYOUTS[0]), [True] * 3)
    assert calls.calls == expected


def step_of(dtype: str | None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(4, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.ConvTranspose2d(32, 32, 2)),
        *(nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Flatten(2), nn.Conv1d(32, 32, 4, groups=32)),
        *(nn.Flatten(), nn.Linear(416, 4)),
    )
    config = ScalerConfig(init_scale=2.0**20, growth_interval=3)
    sgd = stateless(torch.optim.SGD, lr=0.05, momentum=0.9)
    loss_fn = module_loss(model, nn.functional.cross_entropy, keep_buffers=True)
    return make_train_step(loss_fn, sgd, config, policy=dtype)


@pytest.mark.thorough
@pytest.mark.inductor
def test_float16_follows_the_eager_step() -> None:
    step = step_of("float16")
    run, state, expected = jit(step, exact=True), step.init(), step.init()
    skips = []
    for _ in range(30):
        state, metrics = run(state, BATCH)
        expected, wanted = step(expected, BATCH)
        assert torch.equal(metrics.found_inf, wanted.found_inf)
        skips.append(bool(metrics.found_inf))
        assert torch.equal(state.scaler.scale, expected.scaler.scale)
    assert 2 <= sum(skips) < 25
    assert_close(state.params.tree(), expected.params.tree(), 2.0**-6)
    assert_close(state.buffers, expected.buffers, 2.0**-6)
    assert all(leaf.is_contiguous() for leaf in state.params.tree().values())
