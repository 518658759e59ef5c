"""Count a tensor's numbers into one row of float64, or many tensors' into as many rows.

A row has eight numbers; then, for every binary exponent e, the number of finite values with 2^e < |x| < 2^(e+1); then,
for every e, the number of values that are 2^e. Everything comes from the bits, and one scatter counts it.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree, _upstream
from funcamp._check import integer
from funcamp._types import Args, FunctionContext, VmapInfo
from funcamp._upstream.autograd_function import keep_functions_whole

#: Exponents that have a bin: those of float32, from its smallest subnormal, 2^-149, to its largest value, below 2^128,
#: and one bin beyond each end; 2^-150 has a separate bin, because it becomes zero in float32.
LOWEST, HIGHEST = -151, 128
BINS = HIGHEST - LOWEST + 1

#: The first columns of a row.
COUNT, SUM, SUM_OF_SQUARES, NAN, POSINF, NEGINF, POSZERO, NEGZERO = range(8)

#: Their number, after which come the counts between powers of two and those of powers, and the width of a row.
HEAD = 8
WIDTH = HEAD + 2 * BINS

#: Elements per table of counts, and the maximum number of tables.
_ELEMENTS_PER_TABLE = 4096
_MAX_TABLES = 32

#: A table has, for either sign, for numbers between powers of two and for powers, one slot for zero (a power), one per
#: exponent, and one for NaN and infinities (powers). Their number is not a power of two, because places at such
#: distances share a line of a CPU's cache: a scatter to 512 slots takes 2 to 30 times as long.
_ZERO = 0
_FIRST = 1
_NONFINITE = BINS + 1
_SLOTS = BINS + 2

_VMAP_VIEWS_BITS = not _upstream.NO_RULE_FOR_BITS


def check_values(call: str, x: object) -> Tensor:
    """Return x; raise TypeError if it is not a tensor that can be counted."""
    if not has_values(x):
        raise TypeError(f"{call}: x must be a strided floating-point or complex tensor; got {_tree.describe(x)}")
    return x


def has_values(x: object) -> TypeGuard[Tensor]:
    """Return whether x is a tensor that can be counted."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return False
    return x.is_floating_point() or x.is_complex()


def count(x: Tensor) -> Tensor:
    """Return the row of a tensor's record."""
    return counts([take_numbers(x, None).unsqueeze(0)]).squeeze(0)


#: Knuth's: a prime near 2^32 divided by the golden ratio, whose multiples are spread evenly.
_HASH = 2654435761


def take_numbers(x: Tensor, sample: int | None) -> Tensor:
    """Return a tensor's numbers as shape (n,); if it has more, `sample` of them, evenly spread."""
    real_numbers = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    numbers = real_numbers.detach().reshape(-1)
    if sample is None or numbers.numel() <= sample:
        return numbers
    return numbers[_sampled_indices(numbers.numel(), sample, x.device)]


def _sampled_indices(size: int, sample: int, device: torch.device) -> Tensor:
    """Return an index in each of `sample` equal parts of a range, at a place that a hash of the part's number chooses.

    Equal steps would meet some columns of a matrix only.
    """
    parts = torch.arange(sample, device=device)
    firsts = parts * size // sample
    lasts = (parts + 1) * size // sample
    hashes = parts * _HASH % 2**32
    return firsts + (hashes * (lasts - firsts) >> 32)


def counts(parts: list[Tensor]) -> Tensor:
    """Return the rows of records, together in shape (rows, 568), for numbers of shapes (rows, n)."""
    # After vmap the memory may look like channels last, which cat keeps; hence contiguous().
    x = torch.cat(parts).contiguous()
    indices, finite_values = _indices_and_values(_rounded(x).double())
    table = _count_indices(indices)
    both_signs = table[:, 0] + table[:, 1]
    total = finite_values.sum(1, keepdim=True)
    sum_of_squares = finite_values.square().sum(1, keepdim=True)
    columns = [
        torch.full_like(total, x.shape[1]),
        total,
        sum_of_squares,
        both_signs[:, 0, _NONFINITE:],  # NaN
        table[:, :, 1, _NONFINITE],  # +inf and -inf
        table[:, :, 1, _ZERO],  # 0.0 and -0.0
        both_signs[:, :, _FIRST:_NONFINITE].flatten(1),  # per exponent: between powers of two, then powers
    ]
    return torch.cat([column.double() for column in columns], -1)


def _rounded(x: Tensor) -> Tensor:
    """Return numbers of shape (rows, n) as they are stored, wide enough to be counted.

    Stored twice: Inductor computes with float16 and bfloat16 in float32, unrounded, until they are stored; and its code
    for the rest is up to twice as fast if it reads float32.
    """
    return _stored(_stored(x).float()) if x.dtype.itemsize < 8 and x.numel() else x


def _stored(x: Tensor) -> Tensor:
    """Return a tensor of shape (rows, n), and make Inductor store it.

    It stores a tensor for a view of another width. It drops such a view if one follows at once that undoes it, hence
    the two shapes.
    """
    all_bytes = _bits(x.flatten(), torch.uint8)
    bytes_by_row = all_bytes.reshape(x.shape[0], x.shape[1] * x.itemsize)
    return _bits(bytes_by_row, x.dtype)


def check_sample(call: str, sample: int | None) -> int | None:
    """Return a number of elements to count, or None for all; raise if it is neither."""
    if sample is None:
        return None
    return integer(call, "sample", sample, 1, kind="an integer or None")


def _indices_and_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices in a table, as int32, and the finite values, for float64 numbers; the other values are 0."""
    bits = _bits(x, torch.int64)
    magnitude_bits = bits & (2**63 - 1)
    exponent = (magnitude_bits >> 52) - 1023
    slot = exponent.clamp(LOWEST, HIGHEST) + (_FIRST - LOWEST)
    slot = torch.where(exponent == 1024, _NONFINITE, slot)
    slot = torch.where(magnitude_bits == 0, _ZERO, slot)
    is_power_of_two = magnitude_bits & ((1 << 52) - 1) == 0
    index = torch.where(is_power_of_two, slot + _SLOTS, slot)
    index = torch.where(bits < 0, index + 2 * _SLOTS, index)
    return index.to(torch.int32), torch.where(exponent < 1024, x, 0.0)


def _count_indices(indices: Tensor) -> Tensor:
    """Count the indices of shape (rows, n) in a table per row, of shape (rows, sign, power of two, slot).

    One scatter into several tables per row, because writers then rarely collide in one bin.
    """
    rows, length = indices.shape
    device = indices.device
    table_size = 4 * _SLOTS
    wanted_tables = min(max(length // _ELEMENTS_PER_TABLE, 1), _MAX_TABLES)
    tables = 1 << (wanted_tables.bit_length() - 1)  # a power of two, so that `&` distributes over them
    row_numbers = torch.arange(rows, dtype=torch.int32, device=device).unsqueeze(-1)
    indices = indices + table_size * tables * row_numbers
    if tables > 1:
        column_dtype = torch.int32 if length < 2**31 else torch.int64
        column_numbers = torch.arange(length, dtype=column_dtype, device=device)
        indices = indices + table_size * (column_numbers & (tables - 1))
    flat_indices = indices.flatten().long()
    zeros = torch.zeros(rows * tables * table_size, dtype=torch.int32, device=device)
    counted = zeros.scatter_add(0, flat_indices, torch.ones_like(flat_indices, dtype=torch.int32))
    by_table = counted.reshape(rows, tables, 2, 2, _SLOTS)
    return by_table.sum(1) if tables > 1 else by_table.squeeze(1)


class _Bits(Function):
    """View a tensor's bits as another dtype; vmap has no rule for that (`_upstream.NO_RULE_FOR_BITS`)."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: Args, output: Tensor) -> None: ...

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:  # noqa: ARG004
        return _bits(x.movedim(in_dims[0], 0), dtype), 0


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View a tensor's bits as another dtype, also under vmap."""
    if _VMAP_VIEWS_BITS or not _upstream.transforms_active():
        return x.view(dtype)
    keep_functions_whole()
    bits: Tensor = _Bits.apply(x, dtype)  # type: ignore[no-untyped-call]
    return bits
