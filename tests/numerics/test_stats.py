"""`numerics.stats` against plain Python, and its predictions against what rounding really does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.multiprocessing.spawn import spawn

from funcamp.numerics import Stats, stats
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


def by_hand(values: list[float]) -> tuple[dict[str, float], list[int]]:
    """What a record of these values has to say."""
    finite = [value for value in values if math.isfinite(value)]
    zeros = [value for value in finite if value == 0]
    bins = [0] * BINS
    for value in finite:
        if value:
            exponent = math.frexp(value)[1] - 1
            bins[min(max(exponent, LOWEST), LOWEST + BINS - 1) - LOWEST] += 1
    told = {
        "count": len(values),
        "sum": math.fsum(finite),
        "sum_of_squares": math.fsum(value * value for value in finite),
        "nan": sum(map(math.isnan, values)),
        "posinf": values.count(INF),
        "neginf": values.count(-INF),
        "nonfinite": len(values) - len(finite),
        "poszero": sum(math.copysign(1, value) > 0 for value in zeros),
        "negzero": sum(math.copysign(1, value) < 0 for value in zeros),
        "nonzero": len(finite) - len(zeros),
    }
    return told, bins


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", list(WIDER), ids=str)
def test_record_is_what_plain_python_counts(transform: Transform, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL + WIDER[dtype], dtype=torch.float64).to(dtype)
    record = transform(stats)(x)
    told, bins = by_hand(x.tolist())
    assert {name: getattr(record, name).item() for name in told} == pytest.approx(told, rel=1e-15)
    assert record.histogram.tolist() == bins


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_lie_anywhere_in_memory(transform: Transform, dtype: torch.dtype) -> None:
    base = torch.tensor(SPECIAL + WIDER[dtype]).to(dtype)
    views = (base[1:8], base[2::3], base[1:2])
    for x, record in zip(views, transform(lambda *views: [stats(view) for view in views])(*views)):
        told, bins = by_hand(x.tolist())
        assert {name: getattr(record, name).item() for name in told} == pytest.approx(told, rel=1e-15)
        assert record.histogram.tolist() == bins


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
def test_empty_tensors_count_nothing_and_a_scalar_counts(transform: Transform) -> None:
    records = transform(lambda *xs: [stats(x) for x in xs])(torch.zeros(3, 0), torch.zeros(0, 2, dtype=torch.float16))
    assert [record.row.tolist() for record in records] == [[0.0] * 568] * 2
    assert transform(stats)(torch.tensor(-2.0)).sum.item() == -2.0


def test_both_parts_of_a_complex_number_count() -> None:
    pair = stats(torch.tensor([complex(1, -0.0), complex(NAN, INF)]))
    assert [getattr(pair, name).item() for name in ("count", "nan", "posinf", "negzero", "sum")] == [4, 1, 1, 1, 1]
    assert stats(torch.tensor([1 + 2j]).conj()).sum.item() == -1.0


def test_mean_and_std_are_torchs() -> None:
    x = torch.randn(1000, dtype=torch.float64) * 1e-4 + 1e-3
    assert_close([stats(x).mean, stats(x).std], [x.mean(), x.std()], 1e-10)
    with_others = torch.cat([x, torch.tensor([INF, NAN])])
    assert_close([stats(with_others).mean, stats(with_others).std], [x.mean(), x.std()], 1e-10)
    assert [math.isnan(stats(torch.zeros(n)).std) for n in (0, 1, 2)] == [True, True, False]
    assert stats(torch.full((7,), 0.1)).std.item() < 1e-8


@pytest.mark.parametrize(
    ("values", "amax"),
    [([], 0.0), ([0.0, INF], 0.0), ([-3.0, 1.0], 4.0), ([2.0, 1.5], 2.0), ([2.0, 2.5], 4.0), ([1e-45], 2.0**-149)],
)
def test_amax_is_the_next_power_of_two(values: list[float], amax: float) -> None:
    assert stats(torch.tensor(values)).amax.item() == amax


def lost(x: Tensor, dtype: torch.dtype, scale: float) -> tuple[float, float, float]:
    """The fractions that torch's own rounding makes zero, subnormal and too large."""
    x = x[torch.isfinite(x) & (x != 0)].double()
    rounded = (x * scale).to(dtype).double()
    large = ~torch.isfinite(rounded) | (rounded.abs() > torch.finfo(dtype).max)
    small = (rounded != 0) & ((x * scale).abs() < torch.finfo(dtype).tiny)
    return tuple(what.double().mean().item() for what in (rounded == 0, small, large))  # type: ignore[return-value]


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
    x = torch.linspace(1, 2, 100_001)[:-1] * 2.0**-25
    for scale in (0.75, 0.9, 0.55):
        assert stats(x).underflow(torch.float16, scale).item() == pytest.approx(
            lost(x, torch.float16, scale)[0], abs=1e-4
        )
    x = torch.linspace(1, 2, 100_001)[:-1] * 2.0**15
    assert stats(x).overflow(torch.float16).item() == pytest.approx(lost(x, torch.float16, 1.0)[2], abs=1e-4)


def test_one_record_is_asked_about_many_scales() -> None:
    x = torch.randn(2, 50) * 1e-6
    scales = torch.exp2(torch.arange(0.0, 20.0))
    table = stats(x).underflow(torch.float16, scales)
    assert table.tolist() == [stats(x).underflow(torch.float16, scale.item()).item() for scale in scales]
    rows = torch.func.vmap(stats)(x)
    assert rows.underflow(torch.float16, torch.tensor([1.0, 4.0])).shape == (2,)


@pytest.mark.parametrize("factor", [1.0, 2.0**-16, 2.0**7, 2.0**-140, 2.0**140])
def test_rescaled_record_is_that_of_the_rescaled_tensor(factor: float) -> None:
    x = torch.cat([torch.randn(100).double(), torch.tensor([1.0, -2.0, 0.0, INF, NAN])])
    assert_close(stats(x).rescale(factor).row, stats(x * factor).row, 1e-14)


def test_rescaled_by_another_factor_keeps_the_count() -> None:
    x = torch.linspace(1, 2, 10_001)[:-1]
    record = stats(x).rescale(1.5)
    assert record.nonzero.item() == pytest.approx(10_000)
    assert_close(record.histogram, stats(x * 1.5).histogram, 1e-3)
    rows = torch.func.vmap(stats)(torch.stack([x, x])).rescale(torch.tensor([0.5, 2.0]))
    assert_close(rows.mean, torch.tensor([0.75, 3.0]), 1e-4)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
def test_merged_records_are_those_of_all_numbers(transform: Transform) -> None:
    x = torch.tensor(SPECIAL * 4).reshape(4, -1)
    whole = stats(x)
    merged = transform(lambda x: stats(x[:1]) + stats(x[1:]))(x)
    assert_close(merged.row, whole.row, 1e-15)
    assert_same(merged.histogram, whole.histogram)
    samples = torch.func.vmap(stats)(x)
    assert samples.count.tolist() == [15.0] * 4
    assert_close(samples.total().row, whole.row, 1e-15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.integers(0, 40))
def test_any_cut_merges_to_the_whole(values: list[float], cut: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    merged, whole = stats(x[:cut]) + stats(x[cut:]), stats(x)
    assert_same(merged.row[3:], whole.row[3:])
    assert whole.histogram.tolist() == by_hand(x.tolist())[1]


def test_counts_of_many_elements_in_one_bin() -> None:
    # more than one table of counts, and more than float32 counts exactly
    record = stats(torch.ones(1).expand(2**24 + 3))
    assert (record.count.item(), record.nonzero.item(), record.sum.item()) == (2**24 + 3,) * 3


def test_nested_vmap_of_channels_last_halves() -> None:
    x = torch.randn(2, 4, 6, 3).bfloat16().contiguous(memory_format=torch.channels_last)
    each = torch.stack([torch.stack([stats(part).row for part in parts]) for parts in x])
    assert_same(vmap(vmap(stats))(x).row[..., 3:], each[..., 3:])


@pytest.mark.parametrize(
    ("size", "sample"), [(1000, 5), (100_000, 31), (10**6, 47), (4097, 4096), (7, 1), (10_007, 256)]
)
def test_samples_are_spread_and_none_comes_twice(size: int, sample: int) -> None:
    found = take_numbers(torch.arange(float(size)), sample)
    assert sample * 0.9 < len(found.unique()) == len(found) <= sample
    assert found.max() > 0.75 * size or sample == 1


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_counts_what_is_rounded(dtype: torch.dtype) -> None:
    # Inductor keeps what it fuses in float32
    def through(x: Tensor, small: Tensor) -> Any:
        rounded = (x * 2.0**-20).to(dtype)
        return stats(rounded), stats(rounded[1:]), stats(small)

    x = torch.randn(1000)
    small = x.to(dtype)[3:]
    for eager, compiled in zip(through(x, small), torch.compile(through, fullgraph=True)(x, small)):
        assert_same(eager.row[3:], compiled.row[3:])
    assert through(x, small)[0].poszero.item() > 0 or dtype == torch.bfloat16


def test_what_float32_does_not_reach_is_beyond_its_limits() -> None:
    x = torch.tensor([1e-50, 1.0, 1e100], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert stats(x).underflow(dtype).item() == stats(x).overflow(dtype).item() == pytest.approx(1 / 3)
    assert stats(torch.tensor([1e30, 1e35])).rescale(2.0**30).overflow(torch.float32) == 1.0
    assert stats(torch.tensor([1e-40, 1e-30])).rescale(2.0**-30).underflow(torch.float32) == 0.5
    assert stats(torch.tensor([1 + 2j]).conj().imag).sum == -2


def test_factors_must_be_positive() -> None:
    record = stats(torch.ones(2))
    for bad in (-1.0, 0.0, NAN, INF):
        with pytest.raises(ValueError, match="rescale: factor must be a positive number"):
            record.rescale(bad)
        with pytest.raises(ValueError, match="Stats: scale must be a positive number"):
            record.underflow(torch.float16, bad)


def test_nothing_is_differentiated() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not stats(x).row.requires_grad
    assert torch.func.grad(lambda x: stats(x).sum + (x * 2).sum())(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("x", [torch.ones(2, dtype=torch.int64), 1.0, None, torch.ones(2, 2).to_sparse()], ids=repr)
def test_other_things_are_refused(x: Any) -> None:
    with pytest.raises(TypeError, match="stats: x must be a strided floating-point or complex tensor"):
        stats(x)
    with pytest.raises(TypeError, match=r"dtype must be one of torch.float16, .*; got torch.int8"):
        Stats(torch.zeros(568, dtype=torch.float64)).underflow(torch.int8)


def assert_rows_add_up(rank: int, store: str, x: Tensor) -> None:
    """Runs in a process of its own; `spawn` raises what it raises."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    row = stats(x.chunk(2)[rank]).row
    torch.distributed.all_reduce(row)
    assert_same(row[3:], stats(x).row[3:])
    assert_close(row, stats(x).row, 1e-12)
    torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.processes
def test_records_add_up_over_ranks(tmp_path: Path) -> None:
    spawn(assert_rows_add_up, (str(tmp_path / "store"), torch.randn(1001)), nprocs=2)
