"""`numerics.stats` against plain Python, and its predictions against what rounding really does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from funcamp.numerics import stats
from funcamp.numerics.counting import take_numbers
from tests.conftest import Transform
from tests.support.helpers import assert_close, assert_same

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, INF, -INF, -INF, NAN, 1.0, -1.5, 2.0**-24, 2.0**-25, -(2.0**-14), 65504.0, 3.0, -3.0, 0.1]
WIDER = {
    torch.float32: [2.0**-149, -(2.0**-127), 3.4e38, 2.0**127],
    torch.float64: [1e-300, 2.0**-149, 1e300, -5e-324],
    torch.bfloat16: [2.0**-133, 3e38],
    torch.float16: [-6e-8],
}
LOWEST, BINS = -151, 280


def assert_counts(record: Any, values: list[float]) -> None:
    """The record of these values, counted in plain Python."""
    finite = [value for value in values if math.isfinite(value)]
    zeros = [value for value in finite if value == 0]
    bins = [0] * BINS
    for value in finite:
        if value:
            exponent = math.frexp(value)[1] - 1
            bins[min(max(exponent, LOWEST), LOWEST + BINS - 1) - LOWEST] += 1
    expected = {
        "count": len(values),
        "sum_of_squares": math.fsum(value * value for value in finite),
        "nan": sum(map(math.isnan, values)),
        "posinf": values.count(INF),
        "neginf": values.count(-INF),
        "nonfinite": len(values) - len(finite),
        "poszero": sum(math.copysign(1, value) > 0 for value in zeros),
        "negzero": sum(math.copysign(1, value) < 0 for value in zeros),
        "nonzero": len(finite) - len(zeros),
    }
    assert {name: getattr(record, name).item() for name in expected} == pytest.approx(expected, rel=1e-15)
    # Large numbers may cancel.
    assert record.sum.item() == pytest.approx(math.fsum(finite), abs=1e-15 * math.fsum(map(abs, finite)))
    assert record.histogram.tolist() == bins


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", list(WIDER), ids=str)
def test_a_record_is_what_plain_python_counts_wherever_the_numbers_are_in_memory(
    transform: Transform, dtype: torch.dtype
) -> None:
    x = torch.tensor(SPECIAL + WIDER[dtype], dtype=torch.float64).to(dtype)
    views = (x, x[1:8], x[2::3], x[1:2], x[6], x[:0])
    for view, record in zip(views, transform(lambda *all_views: [stats(one) for one in all_views])(*views)):
        assert_counts(record, view.reshape(-1).tolist())


def test_both_parts_of_a_complex_number_count() -> None:
    pair = stats(torch.tensor([complex(1, -0.0), complex(NAN, INF)]))
    assert [getattr(pair, name).item() for name in ("count", "nan", "posinf", "negzero", "sum")] == [4, 1, 1, 1, 1]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert [stats(one).sum.item() for one in (conjugate, conjugate.imag)] == [-1.0, -2.0]


def test_mean_and_std_are_torchs_for_finite_values() -> None:
    x = torch.randn(1000, dtype=torch.float64) * 1e-4 + 1e-3
    record = stats(torch.cat([x, torch.tensor([INF, NAN])]))
    assert_close([record.mean, record.std], [x.mean(), x.std()], 1e-10)
    assert [math.isnan(stats(torch.zeros(n)).std) for n in (0, 1, 2)] == [True, True, False]
    assert stats(torch.full((7,), 0.1)).std.item() < 1e-8


@pytest.mark.parametrize(
    ("values", "amax"),
    [([], 0.0), ([0.0, INF], 0.0), ([-3.0, 1.0], 4.0), ([2.0, 1.5], 2.0), ([2.0, 2.5], 4.0), ([1e-45], 2.0**-149)],
)
def test_amax_is_the_next_power_of_two(values: list[float], amax: float) -> None:
    assert stats(torch.tensor(values)).amax.item() == amax


def lost(x: Tensor, dtype: torch.dtype, scale: float) -> list[float]:
    """The fractions that torch's own rounding makes zero, subnormal and too large."""
    x = x[torch.isfinite(x) & (x != 0)].double()
    rounded = (x * scale).to(dtype).double()
    large = ~torch.isfinite(rounded) | (rounded.abs() > torch.finfo(dtype).max)
    small = (rounded != 0) & ((x * scale).abs() < torch.finfo(dtype).tiny)
    return [what.double().mean().item() for what in (rounded == 0, small, large)]


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_predictions_are_what_rounding_does(dtype: torch.dtype, scale: float) -> None:
    # every exponent of float32, powers of two and values around them: half the smallest subnormal goes to zero
    powers = torch.exp2(torch.arange(-126, 120, dtype=torch.float64)).float()
    x = torch.cat([powers, -powers * (1 + 2.0**-6), powers * (1 - 2.0**-6), torch.tensor([0.0, INF, NAN])])
    zero, small, large = lost(x, dtype, scale)
    record = stats(x)
    assert 0 < zero < 1 or dtype == torch.bfloat16
    assert record.underflow(dtype, scale).item() == pytest.approx(zero, rel=1e-12)
    assert record.subnormal(dtype, torch.tensor(scale)).item() == pytest.approx(small, rel=1e-12)
    if dtype != torch.float8_e4m3fn:  # torch 2.13 rounds to its largest value
        # within the one power of two where values count as evenly spread
        assert record.overflow(dtype, scale).item() == pytest.approx(large, abs=2 / len(powers))


def test_other_scales_and_limits_take_values_as_evenly_spread() -> None:
    small, large = (torch.linspace(1, 2, 100_001)[:-1] * 2.0**power for power in (-25, 15))
    for scale in (0.75, 0.9, 0.55):
        zero, _, _ = lost(small, torch.float16, scale)
        assert stats(small).underflow(torch.float16, scale).item() == pytest.approx(zero, abs=1e-4)
    *_, infinite = lost(large, torch.float16, 1.0)
    assert stats(large).overflow(torch.float16).item() == pytest.approx(infinite, abs=1e-4)


def test_one_record_is_asked_about_many_scales() -> None:
    x = torch.randn(2, 50) * 1e-6
    scales = torch.exp2(torch.arange(0.0, 20.0))
    table = stats(x).underflow(torch.float16, scales)
    assert table.tolist() == [stats(x).underflow(torch.float16, scale.item()).item() for scale in scales]
    assert vmap(stats)(x).underflow(torch.float16, torch.tensor([1.0, 4.0])).shape == (2,)


@pytest.mark.parametrize("factor", [1.0, 2.0**-16, 2.0**7, 2.0**-140, 2.0**140])
def test_a_rescaled_record_is_that_of_the_rescaled_tensor(factor: float) -> None:
    x = torch.cat([torch.randn(100).double(), torch.tensor([1.0, -2.0, 0.0, INF, NAN])])
    assert_close(stats(x).rescale(factor).row, stats(x * factor).row, 1e-14)


def test_a_record_rescaled_by_another_factor_keeps_the_count() -> None:
    x = torch.linspace(1, 2, 10_001)[:-1]
    record = stats(x).rescale(1.5)
    assert record.nonzero.item() == pytest.approx(10_000)
    assert_close(record.histogram, stats(x * 1.5).histogram, 1e-3)
    rows = vmap(stats)(torch.stack([x, x])).rescale(torch.tensor([0.5, 2.0]))
    assert_close(rows.mean, torch.tensor([0.75, 3.0]), 1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.integers(0, 40))
def test_records_of_any_parts_add_up_to_that_of_all_numbers(values: list[float], cut: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    merged, whole = stats(x[:cut]) + stats(x[cut:]), stats(x)
    assert_same(merged.row[3:], whole.row[3:])
    assert_counts(whole, x.tolist())


def test_counts_of_many_elements_in_one_bin() -> None:
    # more than one table of counts, and more than float32 counts exactly
    record = stats(torch.ones(1).expand(2**24 + 3))
    assert (record.count.item(), record.nonzero.item(), record.sum.item()) == (2**24 + 3,) * 3


@pytest.mark.parametrize("columns", [1, 768, 4096, 8192, 50257])
@pytest.mark.parametrize("rows", [512, 4099])
def test_a_sample_has_its_share_of_every_part_of_a_matrix(rows: int, columns: int) -> None:
    sample = min(4096, rows * columns // 2)
    found = take_numbers(torch.arange(rows * columns, dtype=torch.float64), sample).long()
    assert len(found.unique()) == len(found) == sample
    row, column = found // columns, found % columns
    shares = {"first rows": row < rows // 4, "even rows": row % 2 == 0, "first columns": column < columns // 4}
    expected = {"first rows": 0.25, "even rows": 0.5, "first columns": columns // 4 / columns}
    for part, is_there in shares.items():
        assert is_there.double().mean().item() == pytest.approx(expected[part], abs=0.016), part


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_counts_what_is_rounded(dtype: torch.dtype) -> None:
    # Inductor keeps what it fuses in float32
    def through(x: Tensor) -> Any:
        rounded = (x * 2.0**-20).to(dtype)
        return stats(rounded).row, stats(rounded[1:]).row

    x = torch.randn(1000)
    for eager, compiled in zip(through(x), torch.compile(through, fullgraph=True)(x)):
        assert_same(eager[3:], compiled[3:])


def test_what_float32_does_not_reach_is_beyond_its_limits() -> None:
    x = torch.tensor([1e-50, 1.0, 1e100], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert stats(x).underflow(dtype).item() == stats(x).overflow(dtype).item() == pytest.approx(1 / 3)


def test_nothing_is_differentiated() -> None:
    assert not stats(torch.ones(3, requires_grad=True)).row.requires_grad
    assert torch.func.grad(lambda x: stats(x).sum + (x * 2).sum())(torch.ones(2)).tolist() == [2.0, 2.0]
