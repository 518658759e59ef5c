"""The hyperbolic tangent that programs on a CPU compute: as exact as Inductor's own, and with torch's limits."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor

from funcamp import jit
from funcamp._cpu.tanh import NEAR, tanh
from tests.support.generated import written


def inputs() -> Tensor:
    """Numbers of every size and sign, many of them where one formula takes over from the other."""
    sizes = torch.cat([torch.logspace(-38, 2, 100_001), torch.linspace(NEAR - 0.01, NEAR + 0.01, 20_001)])
    return torch.cat([sizes, -sizes, torch.linspace(-10, 10, 200_001)])


def test_it_errs_by_about_one_in_the_last_place() -> None:
    x = inputs()
    true = torch.tanh(x.double())
    last_place = torch.from_numpy(numpy.spacing(true.abs().float().numpy())).double()
    errors = (tanh(x).double() - true).abs() / last_place
    assert errors.max() <= 1.1
    assert errors.mean() <= 0.25
    assert tanh(x).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_limits_are_torchs(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-7, 100.0, -100.0], dtype=dtype)
    value = tanh(x)
    assert value.dtype == dtype
    torch.testing.assert_close(value, torch.tanh(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(value.signbit()[:4], torch.tensor([False, True, False, True]))


@pytest.mark.inductor
def test_programs_have_it_unless_they_are_exact() -> None:
    model = torch.nn.GELU(approximate="tanh")

    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state, model(x).sum() + torch.tanh(x).sum()

    codes = [written(jit(step, exact=exact), torch.zeros(()), torch.randn(64)) for exact in (False, True)]
    assert [".tanh()" in code for code in codes] == [False, True]
