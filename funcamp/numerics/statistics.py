"""Statistics of a tensor that add up over micro-batches, samples of vmap, ranks, uses of a layer.

The effect of rounding to a narrower format, at any loss scale, follows from the counts of exponents
(`formats`). Powers of two are counted separately, because half the smallest subnormal, the tie that rounds to
zero, is one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funcamp import _tree
from funcamp.numerics.counting import (
    BINS,
    COUNT,
    HEAD,
    HIGHEST,
    LOWEST,
    NAN,
    NEGINF,
    NEGZERO,
    POSINF,
    POSZERO,
    SUM,
    SUM_OF_SQUARES,
    WIDTH,
    check_values,
    count,
)
from funcamp.numerics.formats import format_of


class Stats:
    """The counts of one or several tensors, from `stats`; `a + b` merges; immutable, a pytree.

    Counts are float64, exact to 2^53 elements (to 2^36 for one tensor). Sums are over the finite elements, in float64.
    Properties and methods return float64 tensors, one number per record; no sync.

    Example:
        >>> record = stats(torch.tensor([1.0, -2.0, 0.0])) + stats(torch.tensor([float("inf")]))
        >>> record.count.item(), record.posinf.item(), record.sum.item()
        (4.0, 1.0, -1.0)
    """

    row: Tensor
    """float64, shape (..., 568); leading dimensions are a batch of records."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.row + other.row)

    def __repr__(self) -> str:
        return f"Stats({_tree.describe(self.row)})"

    def total(self) -> Stats:
        """Merge a batch of records, for example of vmap, into one."""
        return Stats(self.row.reshape(-1, WIDTH).sum(0))

    @property
    def count(self) -> Tensor:
        """The number of elements."""
        return self.row[..., COUNT]

    @property
    def sum(self) -> Tensor:
        """The sum of the finite elements."""
        return self.row[..., SUM]

    @property
    def sum_of_squares(self) -> Tensor:
        """The sum of squares of the finite elements."""
        return self.row[..., SUM_OF_SQUARES]

    @property
    def nan(self) -> Tensor:
        """The number of NaNs."""
        return self.row[..., NAN]

    @property
    def posinf(self) -> Tensor:
        """The number of +inf."""
        return self.row[..., POSINF]

    @property
    def neginf(self) -> Tensor:
        """The number of -inf."""
        return self.row[..., NEGINF]

    @property
    def poszero(self) -> Tensor:
        """The number of 0.0."""
        return self.row[..., POSZERO]

    @property
    def negzero(self) -> Tensor:
        """The number of -0.0."""
        return self.row[..., NEGZERO]

    @property
    def nonfinite(self) -> Tensor:
        """The number of NaNs and infinities."""
        return self.row[..., NAN:POSZERO].sum(-1)

    @property
    def nonzero(self) -> Tensor:
        """The number of finite nonzero elements, the denominator of the fractions."""
        return self.row[..., HEAD:].sum(-1)

    @property
    def histogram(self) -> Tensor:
        """The number of finite nonzero elements per exponent, shape (..., 280).

        Bins are 2^e <= |x| < 2^(e+1) for e from -151 to 128. The first and the last bin include everything smaller and
        larger.
        """
        return self._between + self._powers

    @property
    def mean(self) -> Tensor:
        """The mean of the finite elements; NaN if there is none."""
        return self.sum / (self.count - self.nonfinite)

    @property
    def std(self) -> Tensor:
        """The standard deviation of the finite elements, over n - 1 as in torch.std; NaN for fewer than two."""
        count = self.count - self.nonfinite
        spread = self.sum_of_squares - self.sum * self.sum / count
        return (spread.clamp(min=0) / (count - 1)).sqrt()

    @property
    def amax(self) -> Tensor:
        """The smallest power of two that no finite magnitude exceeds; 0.0 if there is no nonzero element.

        From 2^-150 to 2^129: what is beyond counts as these, in float64 and after `rescale` too.
        """
        powers_of_two = _powers_of_two(self.row)
        largest_power = torch.where(self._powers > 0, powers_of_two, 0.0)
        bounds = torch.where(self._between > 0, 2 * powers_of_two, largest_power)
        return bounds.amax(-1)

    def underflow(self, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
        """Return the fraction of finite nonzero elements that become zero if scaled and rounded to a dtype.

        Exact if scale is a power of two; otherwise values between two powers count as evenly distributed.
        """
        return self._fraction(self._below(format_of(dtype).underflow, scale, ties=True))

    def subnormal(self, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
        """Return the fraction that becomes subnormal, with fewer digits. Exact as `underflow`."""
        bounds = format_of(dtype)
        below_normal = self._below(bounds.tiny, scale)
        zero = self._below(bounds.underflow, scale, ties=True)
        return self._fraction(below_normal - zero)

    def overflow(self, dtype: torch.dtype, scale: float | Tensor = 1.0) -> Tensor:
        """Return the fraction too large for a dtype.

        Rounded, it becomes infinite. In float8_e4m3fn, which has no infinity, it becomes NaN or the largest value,
        depending on the version of torch. Values in the last power of two before the limit count as evenly distributed.
        """
        return self._fraction(self.nonzero - self._below(format_of(dtype).overflow, scale))

    def rescale(self, factor: float | Tensor) -> Stats:
        """Return the record of the tensor times a positive factor, such as 1 / scale for unscaled gradients.

        Exact if factor is a power of two; otherwise values between two powers count as evenly distributed.
        """
        check_positive("rescale", "factor", factor)
        factor = torch.as_tensor(factor, dtype=torch.float64, device=self.row.device).unsqueeze(-1)
        mantissa, exponent = torch.frexp(factor)
        # factor = 2^shift (1 + excess), with 0 <= excess < 1
        shift = exponent.long() - 1
        excess = 2 * mantissa - 1
        is_power_of_two = excess == 0
        # 2^shift moves the counts by bins. (1 + excess) then moves the upper part of each bin into the next one.
        source = torch.arange(BINS, device=self.row.device) - shift
        between = _shifted(self._between, source)
        powers = _shifted(self._powers, source)
        between_from_below = _shifted(self._between, source - 1)
        staying_fraction = 1 / (1 + excess) * 2 - 1
        spread = between * staying_fraction + between_from_below * (1 - staying_fraction) + powers
        counts_between = torch.where(is_power_of_two, between, spread)
        counts_of_powers = torch.where(is_power_of_two, powers, 0.0)  # no power of two stays one otherwise

        number_of_elements = self.row[..., :SUM]
        scaled_sum = self.sum.unsqueeze(-1) * factor
        scaled_sum_of_squares = self.sum_of_squares.unsqueeze(-1) * factor * factor
        kinds = self.row[..., NAN:HEAD]
        columns = [number_of_elements, scaled_sum, scaled_sum_of_squares, kinds, counts_between, counts_of_powers]
        return Stats(torch.cat(columns, -1))

    @property
    def _between(self) -> Tensor:
        """The number of elements between two powers of two, 2^e < |x| < 2^(e+1), per exponent."""
        return self.row[..., HEAD : HEAD + BINS]

    @property
    def _powers(self) -> Tensor:
        """The number of elements that are powers of two, per exponent."""
        return self.row[..., HEAD + BINS :]

    def _below(self, bound: float, scale: float | Tensor, *, ties: bool = False) -> Tensor:
        """Return the number of finite nonzero elements with |x| scale < bound, or with ties <= bound."""
        check_positive("Stats", "scale", scale)
        scale = torch.as_tensor(scale, dtype=torch.float64, device=self.row.device).unsqueeze(-1)
        ratio = bound / scale / _powers_of_two(self.row)  # of the bound to the lower end of each bin
        power_is_below = ratio >= 1 if ties else ratio > 1
        powers = torch.where(power_is_below, self._powers, 0.0)
        # If the bound is inside a bin, the values of the bin count as evenly distributed.
        fraction_below = (ratio - 1).clamp(0, 1)
        return (powers + self._between * fraction_below).sum(-1)

    def _fraction(self, number: Tensor) -> Tensor:
        return number / self.nonzero.clamp(min=1)


_tree.register(Stats, lambda record: ([record.row], None), lambda rows, _: Stats(rows[0]), "row")


def stats(x: Tensor) -> Stats:
    """Count a tensor's values by kind and exponent, to find out which narrower format fits them.

    Pure; safe under torch.compile and vmap (one record per sample); no sync. It is not differentiable. It counts the
    rounded tensor, even if a compiler would keep a wider one.

    Args:
        x: a floating-point tensor of any shape, also empty; of a complex tensor both parts count.

    Returns:
        The record, a `Stats`.

    Raises:
        TypeError: x is not a strided floating-point or complex tensor.

    Example:
        >>> record = stats(torch.tensor([1e-9, 3e-8, 1.0, 0.0]))
        >>> record.underflow(torch.float16).item(), record.underflow(torch.float16, scale=2.0**16).item()
        (0.3333333333333333, 0.0)
    """
    return Stats(count(check_values("stats", x)))


def check_positive(call: str, name: str, value: float | Tensor) -> None:
    """Raise ValueError if a number is not positive and finite; a tensor is not read."""
    if not isinstance(value, Tensor) and not 0 < value < math.inf:
        raise ValueError(f"{call}: {name} must be a positive number; got {value!r}")


def _powers_of_two(row: Tensor) -> Tensor:
    """Return 2^e of every bin, from bits, because exp2 may be off in the last place."""
    exponents = torch.arange(LOWEST + 1023, HIGHEST + 1024, dtype=torch.int64, device=row.device)
    return (exponents << 52).view(torch.float64)


def _shifted(counts: Tensor, source: Tensor) -> Tensor:
    """Shift counts by bins; the first and the last bin collect what would be lost.

    source: the bin that each bin takes its count from.
    """
    is_inside = (source >= 0) & (source < BINS)
    nearest_source = source.clamp(0, BINS - 1).expand(counts.shape)
    moved = torch.where(is_inside, counts.gather(-1, nearest_source), 0.0)
    lost = counts.sum(-1) - moved.sum(-1)
    moves_down = source[..., 0] > 0
    end_bin = torch.where(moves_down, 0, BINS - 1)
    return moved + lost.unsqueeze(-1) * torch.nn.functional.one_hot(end_bin, BINS)
