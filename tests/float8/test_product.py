"""The claim: a float8 product is that of the scaled operands, and the emulated one up to the last bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcamp import _upstream, float8
from tests.conftest import Transform
from tests.support.helpers import assert_close, assert_same

CONFIGS = {
    "tensor": float8.Float8Config(),
    "tensor powers": float8.Float8Config(power_of_two=True),
    "row": float8.Float8Config(granularity="row"),
    "rowwise": float8.Float8Config("row", power_of_two=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def emulated(config: float8.Float8Config) -> float8.Float8Config:
    return dataclasses.replace(config, emulate=True)


def possible(config: float8.Float8Config) -> float8.Float8Config:
    """The configuration, emulated where this torch has no such product on a CPU."""
    return emulated(config) if config.by_row and _upstream.NO_ROWS_ON_CPU else config


def gradients(x: Tensor, weight: Tensor, g: Tensor, config: float8.Float8Config) -> list[Tensor]:
    """The product and its gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = float8.scaled_mm(x, weight, config)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), g.to(y.dtype))]


@every_config
def test_products_are_those_of_the_scaled_operands(config: float8.Float8Config) -> None:
    """Written out, each operand is scaled along the dimension that the product sums over."""
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


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_emulation_is_the_product(config: float8.Float8Config, dtype: torch.dtype) -> None:
    for rows, width, out in ((16, 16, 16), (3, 32, 64), (40, 1040, 48)):
        x, weight, g = torch.randn(rows, width).to(dtype), torch.randn(out, width), torch.randn(rows, out) * 1e-3
        # On some processors torch's product sums in another order.
        for one, other in zip(*(gradients(x, weight, g, of) for of in (possible(config), emulated(config)))):
            last_bit = torch.finfo(torch.bfloat16 if config.by_row else other.dtype).eps
            assert_close(one, other, max(last_bit, 1e-6))


def test_dtypes_shapes_and_zero_rows_are_those_of_a_linear_layer() -> None:
    weight = torch.randn(32, 16, requires_grad=True)
    for shape in ((16,), (2, 5, 16), (0, 16), (2, 0, 16)):
        x = torch.randn(shape).bfloat16().requires_grad_()
        y = float8.scaled_mm(x, weight)
        assert (y.dtype, y.shape) == (torch.bfloat16, F.linear(x, weight.bfloat16()).shape)
        assert [grad.dtype for grad in torch.autograd.grad(y.sum(), (x, weight))] == [torch.bfloat16, torch.float32]
    assert torch.equal(float8.scaled_mm(torch.zeros(3, 16), weight), torch.zeros(3, 32))
    x = torch.randn(4, 16)
    for config in (CONFIGS["tensor"], emulated(CONFIGS["tensor"])):
        with torch.autocast("cpu", torch.bfloat16):
            y = float8.scaled_mm(x, weight, config)
        assert_same(y, float8.scaled_mm(x.bfloat16(), weight))


@every_config
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "weight", "g"])
def test_an_overflow_reaches_the_gradients(config: float8.Float8Config, bad: float, where: str) -> None:
    given = {name: torch.randn(16, 16) for name in ("x", "weight", "g")}
    given[where][2, 3] = bad
    _, *grads = gradients(**given, config=possible(config))
    assert not all(torch.isfinite(grad).all() for grad in grads)
    if where != "weight":  # what trains is what is checked
        assert not torch.isfinite(grads[1]).all()


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["tensor", "rowwise"])
@pytest.mark.parametrize("emulate", [False, True])
def test_products_under_every_transform(
    transform: Transform, request: pytest.FixtureRequest, name: str, emulate: bool
) -> None:
    config = emulated(CONFIGS[name]) if emulate else possible(CONFIGS[name])

    def step(x: Tensor, weight: Tensor) -> Any:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return float8.scaled_mm(x.tanh(), weight, config).square().mean()

        return torch.func.grad_and_value(loss, argnums=(0, 1))(x, weight)

    args = torch.randn(16, 32), torch.randn(48, 32)
    expected, found = step(*args), transform(step)(*args)
    # A last bit of the operations around a product can move a number to the next float8 number.
    assert_close(found, expected, 1e-6 if "inductor" not in request.node.name else 2e-2)
    assert all(value.any() for value in expected[0])


@pytest.mark.parametrize("path", ["x to weight", "weight to x", "x to the layer after", "weight to the layer after"])
def test_a_second_derivative_is_refused(path: str) -> None:
    """Also where the gradient of the product is a constant, and where it is all that depends on the other."""
    x, weight, after = (torch.randn(16, 16, requires_grad=True) for _ in range(3))
    leaves = {"x": x, "weight": weight, "the layer after": after}
    first, second = (leaves[leaf] for leaf in path.split(" to "))
    y = float8.scaled_mm(x, weight)
    loss = (y * after).sum() if second is after else y.sum()
    (grad,) = torch.autograd.grad(loss, first, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated once.*keep="):
        torch.autograd.grad(grad.square().sum(), second)
