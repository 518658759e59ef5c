"""Count a tensor's numbers into one row of float64, or many tensors' into as many rows.

A row has eight numbers; then, for every binary exponent e, the number of finite values with 2^e < |x| < 2^(e+1); then,
for every e, the number of values that are 2^e. Everything comes from the bits, and one scatter counts it.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree, _upstream
from funcamp._check import integer
from funcamp._upstream.autograd_function import keep_functions_whole

#: Exponents that have a bin: those of float32, from its smallest subnormal, 2^-149, to its largest value, below 2^128,
#: and one bin beyond each end; 2^-150 has a separate bin, because it becomes zero in float32.
LOWEST, HIGHEST = -151, 128
BINS = HIGHEST - LOWEST + 1
HEAD = 8
WIDTH = HEAD + 2 * BINS

#: Elements per table of counts, and the maximum number of tables.
_PART, _TABLES = 4096, 32

#: A table has, for either sign, for numbers between powers of two and for powers, one slot for zero (a power), one per
#: exponent, and one for NaN and infinities (powers). Their number is not a power of two, because places at such
#: distances share a line of a CPU's cache: a scatter to 512 slots takes 2 to 30 times as long.
_ZERO, _FIRST, _NONFINITE, _SLOTS = 0, 1, BINS + 1, BINS + 2

_VIEWS_BATCH = not _upstream.NO_RULE_FOR_BITS.present


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
    return counts([taken(x, None).unsqueeze(0)]).squeeze(0)


#: Neighbors taken together in a sample, because one number of a cache line costs as much as all of them.
_BLOCK = 16


def taken(x: Tensor, sample: int | None) -> Tensor:
    """Return a tensor's numbers as shape (n,); if it has more, about `sample` of them, evenly spread."""
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()).detach().reshape(-1)
    if sample is None or x.numel() <= sample:
        return x
    block = max(1, min(_BLOCK, sample // _BLOCK))
    blocks, wanted = x.numel() // block, sample // block
    places = torch.arange(wanted, device=x.device) * _stride(blocks, wanted) % blocks
    return x[: blocks * block].reshape(blocks, block)[places].reshape(-1)


def counts(parts: list[Tensor]) -> Tensor:
    """Return the rows of records, together in shape (rows, 568), for numbers of shapes (rows, n)."""
    # After vmap the memory may look like channels last, which cat keeps; hence contiguous().
    x = torch.cat(parts).contiguous()
    place, values = _placed_wide(x) if x.dtype == torch.float64 else _placed(_single_bits(x))
    values, found = values.double(), _table(place)
    both = found[:, 0] + found[:, 1]
    total, squares = values.sum(1, keepdim=True), values.square().sum(1, keepdim=True)
    columns = [
        *(torch.full_like(total, x.shape[1]), total, squares, both[:, 0, _NONFINITE:]),
        *(found[:, :, 1, _NONFINITE], found[:, :, 1, _ZERO], both[:, :, _FIRST:_NONFINITE].flatten(1)),
    ]
    return torch.cat([column.double() for column in columns], -1)


def _single_bits(x: Tensor) -> Tensor:
    """Return the float32 bits of numbers of shape (rows, n), as int32."""
    if x.dtype == torch.float32 or not x.numel():
        return _bits(x.float(), torch.int32)
    # Twice: Inductor computes with float16 and bfloat16 in float32, unrounded, until they are stored; and its code for
    # the rest is three times as fast if it reads float32.
    return _stored(_stored(x, x.dtype).float(), torch.int32)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bits of a tensor of shape (rows, n) as a dtype of equal width, and make Inductor store it for that.

    It stores a tensor for a view of another width. It drops such a view if one follows at once that undoes it, hence
    the two shapes.
    """
    octets = _bits(x.flatten(), torch.uint8).reshape(x.shape[0], x.shape[1] * x.itemsize)
    return _bits(octets, dtype)


def _stride(size: int, sample: int) -> int:
    """Return a stride that spreads sample places over size, wrapping around at its end.

    It is coprime to size, so no place comes twice and every column of a matrix is sampled.
    """
    stride = -(-size // sample)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def check_sample(call: str, sample: int | None) -> int | None:
    """Return a number of elements to count, or None for all; raise if it is neither."""
    if sample is None:
        return None
    return integer(call, "sample", sample, 1, kind="an integer or None")


def _placed(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in a table, as int32, and the finite values, for numbers given as float32 bits."""
    low = bits & 0x7FFFFFFF
    tiny = low < 0x800000
    # A subnormal is an integer times 2^-149, so the exponent of that integer gives its exponent.
    lifted = torch.where(tiny, _bits(low.float(), torch.int32), low)
    field = lifted >> 23
    place = (torch.where(tiny, field - 149, field) + (_FIRST - LOWEST - 127)).clamp(min=_ZERO)
    place = torch.where(low >= 0x7F800000, place + 1, place)
    place = torch.where((lifted & 0x7FFFFF) == 0, place + _SLOTS, place)
    place = torch.where(bits < 0, place + 2 * _SLOTS, place)
    return place, torch.where(low < 0x7F800000, _bits(bits, torch.float32), 0.0)


def _placed_wide(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same for float64 numbers."""
    bits = _bits(x, torch.int64)
    low = bits & (2**63 - 1)
    exponent = (low >> 52) - 1023
    slot = exponent.clamp(LOWEST, HIGHEST) + (_FIRST - LOWEST)
    slot = torch.where(exponent == 1024, _NONFINITE, slot)
    place = torch.where(low == 0, _ZERO, slot)
    place = torch.where(low & ((1 << 52) - 1) == 0, place + _SLOTS, place)
    place = torch.where(bits < 0, place + 2 * _SLOTS, place)
    return place.to(torch.int32), torch.where(exponent < 1024, x, 0.0)


def _table(place: Tensor) -> Tensor:
    """Count the numbers of shape (rows, n) per place, in shape (rows, sign, power of two, slot).

    One scatter into several tables per row, because writers then rarely collide in one bin.
    """
    (rows, length), size, device = place.shape, 4 * _SLOTS, place.device
    tables = 1 << (min(max(length // _PART, 1), _TABLES).bit_length() - 1)
    place = place + size * tables * torch.arange(rows, dtype=torch.int32, device=device).unsqueeze(-1)
    if tables > 1:
        index = torch.int32 if length < 2**31 else torch.int64
        place = place + size * (torch.arange(length, dtype=index, device=device) & (tables - 1))
    place = place.flatten().long()
    found = torch.zeros(rows * tables * size, dtype=torch.int32, device=device)
    found = found.scatter_add(0, place, torch.ones_like(place, dtype=torch.int32))
    found = found.reshape(rows, tables, 2, 2, _SLOTS)
    return found.sum(1) if tables > 1 else found.squeeze(1)


class _Bits(Function):
    """View a tensor's bits as another dtype; vmap has no rule for that (`_upstream.NO_RULE_FOR_BITS`)."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:  # noqa: ARG004
        return _bits(x.movedim(in_dims[0], 0), dtype), 0


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    if _VIEWS_BATCH or not _upstream.transforms_active():
        return x.view(dtype)
    if torch.compiler.is_dynamo_compiling():
        keep_functions_whole()
    bits: Tensor = _Bits.apply(x, dtype)  # type: ignore[no-untyped-call]
    return bits
