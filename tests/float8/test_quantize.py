"""The claim: a tensor becomes the nearest float8 numbers at torchao's scale, saturated; no overflow is hidden."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcamp import float8
from tests.float8.peer_rules import torchao_scale
from tests.support.helpers import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest(value: float, dtype: torch.dtype) -> Any:
    """The float8 number nearest to a value, the even one of two, of its sign: by search among all 256."""
    known = torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()
    sign = math.copysign(1, value)
    ranks = [(abs(n - value), code % 2, -sign * math.copysign(1, n), n) for code, n in enumerate(known)]
    return min(rank for rank in ranks if math.isfinite(rank[-1]))[-1]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(numbers, min_size=1, max_size=6), st.sampled_from([E4M3, E5M2]), st.booleans())
def test_the_scale_and_the_values_are_torchaos(values: list[float], dtype: torch.dtype, power: bool) -> None:
    x = torch.tensor(values)
    found = float8.quantize(x, dtype, power_of_two=power)
    scale = torchao_scale(max(abs(value) for value in x.tolist()), TOP[dtype], power)
    assert found.scale.item() == scale
    clamped = (x * scale).clamp(-TOP[dtype], TOP[dtype]).tolist()
    assert found.values.float().tolist() == [nearest(value, dtype) for value in clamped]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_is_never_hidden(dtype: torch.dtype, bad: float) -> None:
    found = float8.quantize(torch.tensor([1.0, bad]), dtype)
    assert not torch.isfinite(found.values.float()[1])
    assert not torch.isfinite(found.dequantize()[1])
    row = float8.quantize(torch.tensor([[1.0, 2.0], [bad, 3.0]]), dtype, dim=1)
    assert torch.isfinite(row.dequantize()).tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_and_the_ends_of_the_range(dtype: torch.dtype) -> None:
    zeros = float8.quantize(torch.tensor([0.0, -0.0]), dtype)
    assert zeros.scale.item() == torchao_scale(0.0, TOP[dtype])
    assert_same(zeros.dequantize(), torch.tensor([0.0, -0.0]))
    large = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert float8.quantize(large, dtype).values.float().tolist() == [TOP[dtype], 0.0]
    assert float8.quantize(torch.tensor([1e-30]), dtype).values.float().item() == 0.0  # below torchao's 1e-12


def test_a_scale_per_row_is_the_scale_of_the_row() -> None:
    x = torch.randn(5, 7).bfloat16()
    for dim in (0, 1):
        found = float8.quantize(x, dim=dim)
        rows = [float8.quantize(row) for row in x.unbind(1 - dim)]
        assert_same(found.scale.flatten(), torch.stack([row.scale for row in rows]))
        expected = torch.stack([row.values.float() for row in rows], 1 - dim)
        assert_same(found.values.float(), expected)
