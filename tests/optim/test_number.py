"""The claim: beside a tensor a `Number` is a Python number: the same dtype, and in float16 and bfloat16 the same bits.

torch rounds a number otherwise beside a tensor of shape () than beside one with elements, on the left otherwise than on
the right, and whole numbers make floats of it; so each operator is tried with all of these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp._optim.decisions import Decisions
from funcamp._optim.number import as_number
from funcamp._optim.pure_calls import PureCalls

Call = Callable[[Tensor, Any], Any]

_SYMBOLS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "==": operator.eq,
    ">=": operator.ge,
}


def _left(symbol: str) -> Call:
    return lambda tensor, number: _SYMBOLS[symbol](tensor, number)


def _right(symbol: str) -> Call:
    return lambda tensor, number: _SYMBOLS[symbol](number, tensor)


def _in_place(method: str) -> Call:
    def call(tensor: Tensor, number: Any) -> Tensor:
        result: Tensor = getattr(tensor, method)(number)
        assert result is tensor
        return result

    return call


def _of_list(name: str) -> Call:
    return lambda tensor, number: getattr(torch, name)([tensor], number)[0]


def _of_list_in_place(tensor: Tensor, number: Any) -> Tensor:
    torch._foreach_addcdiv_([tensor], [tensor.clone()], [tensor + 1], [number])
    return tensor


CALLS: dict[str, Call] = {
    **{f"tensor {symbol} number": _left(symbol) for symbol in _SYMBOLS},
    **{f"number {symbol} tensor": _right(symbol) for symbol in _SYMBOLS},
    **{method: _in_place(method) for method in ("add_", "sub_", "mul_", "div_", "clamp_max_", "__imul__")},
    "clamp": lambda tensor, number: tensor.clamp(max=number),
    "where": lambda tensor, number: torch.where(tensor > 1, tensor, number),
    "masked_fill": lambda tensor, number: tensor.masked_fill(tensor > 1, number),
    "lerp": lambda tensor, number: tensor.lerp(tensor + 1, number),
    "addcmul": lambda tensor, number: torch.addcmul(tensor, tensor, tensor, value=number),
    "addcdiv": lambda tensor, number: torch.addcdiv(tensor, tensor, tensor + 1, value=number),
    "add": lambda tensor, number: torch.add(tensor, tensor, alpha=number),
    "sub": lambda tensor, number: torch.sub(tensor, tensor + 1, alpha=number),
    "of a sum": lambda tensor, number: tensor.sum() / number,
    "chained": lambda tensor, number: tensor.mean().mul(-number).add_(number).clamp_(min=number),
    **{f"_foreach_{name}": _of_list(f"_foreach_{name}") for name in ("add", "mul", "div", "maximum", "clamp_min")},
    "_foreach_addcdiv_": _of_list_in_place,
    "_foreach_add of a list": lambda tensor, number: torch._foreach_add([tensor], [tensor], alpha=number)[0],
}


def compared(call: Call, tensor: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Return what a call makes of a `Number`, and what it makes of the number."""
    expected = call(tensor.clone(), value)
    decisions = Decisions("Optimizer")
    decisions.is_constructing = False
    number = as_number("lr", value, torch.tensor(value, dtype=torch.float64), decisions)
    with PureCalls(False, [], [], decisions):
        found = call(tensor.clone(), number)
    return found, expected


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Return a tensor with elements, and some of shape ()."""
    numbers = torch.rand(1024, generator=torch.Generator().manual_seed(0)) * 3 + 0.1
    return [numbers.to(dtype), *numbers[:40].to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_in_half_precision_it_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    for value in (0.33333, -1.7, 0.9999):
        for tensor in tensors(dtype):
            found, expected = compared(CALLS[name], tensor, value)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_in_other_precision_it_has_the_same_dtype_and_rounds_alike(name: str, dtype: torch.dtype) -> None:
    # Where torch's CPU adds a product in one rounding, or takes a power in double precision.
    precision = 4 * torch.finfo(dtype).eps
    for value in (0.33333, -1.7, 0.9999):
        for tensor in tensors(dtype):
            found, expected = compared(CALLS[name], tensor, value)
            torch.testing.assert_close(found, expected, rtol=precision, atol=precision, equal_nan=True)


@pytest.mark.parametrize("symbol", _SYMBOLS)
def test_beside_whole_numbers_it_has_the_same_dtype(symbol: str) -> None:
    for tensor in (torch.tensor(3), torch.tensor([3, 4, 5])):
        for call in (_left(symbol), _right(symbol)):
            found, expected = compared(call, tensor, 0.9)
            torch.testing.assert_close(found, expected)
