"""The claim: torch's functions on a tensor in a number's place compute what they compute with the number.

In float16 and bfloat16 the results have equal bits: each function rounds where torch's own kernel rounds. In float32
and float64 torch's CPU kernels may add a product in one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp._optim.scalar_arguments import _FORMULAS, call_on_tensors

#: Neither is a number of float16 or bfloat16.
NUMBER, SECOND_NUMBER = -0.0714285714, 1.2345678

#: One more than a multiple of every vector's length: torch's kernels have other code for the rest.
SIZE = 1025


def calls(dtype: torch.dtype) -> dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return, for each function, its arguments from two numbers or two tensors."""
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.randn(SIZE, generator=draws).to(dtype) for _ in range(2))
    positive = second.abs() + 0.125
    matrices = [torch.randn(9, 9, generator=draws).to(dtype) for _ in range(3)]
    return {
        "add": lambda number, _: ((first, second), {"alpha": number}),
        "sub": lambda number, _: ((first, second), {"alpha": number}),
        "addcmul": lambda number, _: ((first, second, positive), {"value": number}),
        "addcdiv": lambda number, _: ((first, second, positive), {"value": number}),
        "lerp": lambda number, _: ((first, second, number), {}),
        "addmm": lambda number, other: (tuple(matrices), {"beta": number, "alpha": other}),
        "clamp": lambda number, other: ((first, number, other), {}),
        "full_like": lambda number, _: ((first, number), {}),
        "new_full": lambda number, _: ((first, (3,), number), {}),
        "full": lambda number, _: (((3,), number), {"dtype": dtype}),
    }


def test_every_function_is_compared() -> None:
    assert calls(torch.float32).keys() == _FORMULAS.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", _FORMULAS)
def test_a_tensor_for_the_number_is_the_number(name: str, dtype: torch.dtype) -> None:
    make = calls(dtype)[name]
    numbers = torch.tensor(NUMBER, dtype=torch.float64), torch.tensor(SECOND_NUMBER, dtype=torch.float64)
    args, kwargs = make(*(number.item() for number in numbers))
    function = torch.Tensor.new_full if name == "new_full" else getattr(torch, name)
    expected: Tensor = function(*args, **kwargs)
    args, kwargs = make(*numbers)
    call = call_on_tensors(name, args, kwargs)
    assert call is not None
    found = call()
    assert found.dtype == expected.dtype
    if dtype.itemsize == 2:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_alpha_times_a_number(dtype: torch.dtype) -> None:
    base = torch.randn(SIZE - 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    call = call_on_tensors("add", (base, SECOND_NUMBER), {"alpha": torch.tensor(NUMBER, dtype=torch.float64)})
    assert call is not None
    assert torch.equal(call(), torch.add(base, SECOND_NUMBER, alpha=NUMBER))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["add", "sub", "addcmul", "addcdiv", "lerp", "clamp", "addmm"])
def test_in_place_too(name: str, dtype: torch.dtype) -> None:
    make = calls(dtype)[name]
    (base, *others), kwargs = make(NUMBER, SECOND_NUMBER)
    assert isinstance(base, Tensor)
    expected = getattr(base.clone(), name + "_")(*others, **kwargs)
    (_, *others), kwargs = make(*(torch.tensor(number, dtype=torch.float64) for number in (NUMBER, SECOND_NUMBER)))
    written = base.clone()
    call = call_on_tensors(name + "_", (written, *others), kwargs)
    assert call is not None
    assert call() is written
    assert torch.equal(written, expected)
