"""The claim: a float8 product is the emulated one up to the last bit, and the exact one within the formats' bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from funcamp import _upstream, float8
from tests.conftest import Transform
from tests.support.helpers import assert_close, assert_same

settings.register_profile("funcamp", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("funcamp")

#: Half a step of the format relative to a number, and half its smallest subnormal number.
ROUNDING = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.float8_e5m2: (2.0**-3, 2.0**-17)}
CONFIGS = {
    "tensor": float8.Float8Config(),
    "tensor powers": float8.Float8Config(power_of_two=True),
    "row": float8.Float8Config(granularity="row"),
    "rowwise": float8.Float8Config("row", power_of_two=True),
}


def emulated(config: float8.Float8Config) -> float8.Float8Config:
    return float8.Float8Config(**{**vars(config), "emulate": True})


def gradients(x: Tensor, weight: Tensor, g: Tensor, config: float8.Float8Config) -> list[Tensor]:
    """The product and its gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = float8.scaled_mm(x, weight, config)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))]


def needs(config: float8.Float8Config) -> float8.Float8Config:
    """The configuration, emulated where this torch has no such product on a CPU."""
    return emulated(config) if config.by_row and _upstream.NO_ROWS_ON_CPU else config


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_emulation_is_the_product(name: str, dtype: torch.dtype) -> None:
    config = needs(CONFIGS[name])
    for rows, width, out in ((16, 16, 16), (3, 32, 64), (40, 1040, 48)):
        x, weight, g = torch.randn(rows, width).to(dtype), torch.randn(out, width), torch.randn(rows, out) * 1e-3
        # On some processors torch's product sums in another order.
        found, expected = gradients(x, weight, g, config), gradients(x, weight, g, emulated(config))
        for one, other in zip(found, expected):
            last_bit = torch.finfo(torch.bfloat16 if config.by_row else other.dtype).eps
            assert_close(one, other, max(last_bit, 1e-6))


def bound(a: Tensor, b: Tensor, formats: tuple[torch.dtype, torch.dtype], config: float8.Float8Config) -> Tensor:
    """How far the product of quantized a and b, along their last dimensions, may be from a b^T."""
    errors = []
    for value, dtype in zip((a, b), formats):
        amax = value.abs().amax(1, keepdim=True) if config.by_row else value.abs().amax()
        scale = torch.finfo(dtype).max / amax.clamp(min=1e-12) / (2 if config.power_of_two else 1)
        relative, least = ROUNDING[dtype]
        errors.append(value.abs() * (relative + 1e-6) + least / scale)
    ea, eb = errors
    exact = ea @ b.abs().t() + a.abs() @ eb.t() + ea @ eb.t()
    sums = (a.abs() + ea) @ (b.abs() + eb).t()
    return exact + sums * (a.shape[1] * 2.0**-23 + (2.0**-7 if config.by_row else 0.0))


@given(st.sampled_from(list(CONFIGS)), st.integers(1, 33), st.integers(-60, 60), st.integers(0, 10**6))
def test_gradients_are_the_float64_products_within_the_formats_bounds(
    name: str, rows: int, exponent: int, seed: int
) -> None:
    config = emulated(CONFIGS[name])
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(3, 48, generator=draw) * 3

    def drawn(rows: int, width: int, row: int) -> Tensor:
        return torch.randn(rows, width, generator=draw) * spread[row, :width].exp()

    x, weight, g = drawn(rows, 32, 0) * 2.0 ** (exponent // 4), drawn(48, 32, 1), drawn(rows, 48, 2) * 2.0**exponent
    y, grad_x, grad_weight = (value.double() for value in gradients(x, weight, g, config))
    x, weight, g = x.double(), weight.double(), g.double()
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    for found, a, b, formats in (
        (y, x, weight, (forward, forward)),
        (grad_x, g, weight.t(), (backward, forward)),
        (grad_weight, g.t(), x.t(), (backward, forward)),
    ):
        assert ((found - a @ b.t()).abs() <= bound(a, b, formats, config)).all()


def test_dtypes_shapes_and_zero_rows() -> None:
    weight = torch.randn(32, 16, requires_grad=True)
    for shape in ((16,), (3, 16), (2, 5, 16), (0, 16), (2, 0, 16)):
        x = torch.randn(shape).bfloat16().requires_grad_()
        y = float8.scaled_mm(x, weight)
        assert y.dtype == torch.bfloat16
        assert y.shape == F.linear(x, weight.bfloat16()).shape
        grad_x, grad_weight = torch.autograd.grad(y.sum(), (x, weight))
        assert (grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(float8.scaled_mm(torch.zeros(3, 16), weight), torch.zeros(3, 32))


def test_autocast_casts_as_for_a_linear_layer() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = float8.scaled_mm(x, weight)
        again = float8.scaled_mm(x, weight, float8.Float8Config(emulate=True))
    assert_same(y, float8.scaled_mm(x.bfloat16(), weight))
    assert_same(again, y)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "weight", "g"])
def test_an_overflow_reaches_the_gradients(name: str, bad: float, where: str) -> None:
    config = needs(CONFIGS[name])
    given = {"x": torch.randn(16, 16), "weight": torch.randn(16, 16), "g": torch.randn(16, 16)}
    given[where][2, 3] = bad
    x, weight = given["x"].requires_grad_(), given["weight"].requires_grad_()
    grads = torch.autograd.grad(float8.scaled_mm(x, weight, config), (x, weight), given["g"])
    assert not all(torch.isfinite(grad).all() for grad in grads)
    if where != "weight":  # what trains is what is checked
        assert not torch.isfinite(grads[1]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_those_of_dequantized_tensors(name: str) -> None:
    """The three products written out: each operand is scaled along the dimension that the product sums over."""
    config = CONFIGS[name]
    x, weight, g = torch.randn(16, 32), torch.randn(48, 32), torch.randn(16, 48) * 1e-3

    def known(value: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        dim = 1 if config.by_row else None
        return float8.quantize(value, dtype, dim=dim, power_of_two=config.power_of_two).dequantize()

    e5m2 = torch.float8_e5m2
    expected = [
        known(x) @ known(weight).t(),
        known(g, e5m2) @ known(weight.t()).t(),
        known(g.t(), e5m2) @ known(x.t()).t(),
    ]
    tolerance = 2.0**-8 if config.by_row else 1e-6  # rounded to bfloat16
    assert_close(gradients(x, weight, g, emulated(config)), expected, tolerance)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["tensor", "rowwise"])
@pytest.mark.parametrize("emulate", [False, True])
def test_products_under_every_transform(
    transform: Transform, request: pytest.FixtureRequest, name: str, emulate: bool
) -> None:
    config = needs(CONFIGS[name])
    config = emulated(config) if emulate else config
    x, weight = torch.randn(16, 32), torch.randn(48, 32)

    def step(x: Tensor, weight: Tensor) -> Any:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return float8.scaled_mm(x.tanh(), weight, config).square().mean()

        return torch.func.grad_and_value(loss, argnums=(0, 1))(x, weight)

    args = (x, weight)
    expected, found = step(*args), transform(step)(*args)
    # A last bit of the operations around a product can move a number to the next float8 number.
    assert_close(found, expected, 1e-6 if "inductor" not in request.node.name else 2e-2)
    assert all(value.any() for value in expected[0])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("path", ["x to weight", "weight to x", "x to the layer after", "weight to the layer after"])
def test_a_second_derivative_says_what_to_do(name: str, path: str) -> None:
    """Also where the gradient of the product is a constant, and where it is all that depends on the other."""
    config = needs(CONFIGS[name])
    x, weight, after = (torch.randn(16, 16, requires_grad=True) for _ in range(3))
    y = float8.scaled_mm(x, weight, config)
    leaves = {"x": x, "weight": weight, "the layer after": after}
    first, second = (leaves[leaf] for leaf in path.split(" to "))
    loss = (y * after).sum() if second is after else y.sum()
    (grad,) = torch.autograd.grad(loss, first, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(grad.square().sum(), second)
