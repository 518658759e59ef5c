"""Scale a tensor into float8: the scale of the present tensor, and a cast that saturates and hides no overflow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import boolean
from funcamp._scaler.state import reciprocal, widen
from funcamp.float8.config import FORWARD, LARGEST

#: The smallest amax that torchao distinguishes from 0.
_SMALLEST_AMAX = 1e-12

#: The dtypes that are quantized.
WIDE = (torch.float32, torch.bfloat16, torch.float16)


class Quantized(NamedTuple):
    """A tensor in float8 with its scale: a pytree of two tensors, made by `quantize`."""

    values: Tensor
    """float8_e4m3fn or float8_e5m2: tensor * scale, saturated; NaN where the tensor is not finite."""
    scale: Tensor
    """float32: shape (), or with the dimension of `dim` 1."""

    def dequantize(self) -> Tensor:
        """Return values * f32(1 / f64(scale)), float32: the numbers that a product multiplies. No sync."""
        return self.values.float() * reciprocal(self.scale)


def quantize(
    x: Tensor,
    dtype: torch.dtype = FORWARD,
    *,
    dim: int | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """Scale a tensor into float8.

    values = cast(clamp(f32(x) * scale, -largest, largest)), rounded to nearest even, with the scale
    f32(largest / max(f64(amax), 1e-12)) of the largest magnitude (amax). A value that is not finite is never clamped:
    it becomes NaN, so an overflow reaches the product, the gradients and the flag `found_inf`. Pure; safe under
    torch.compile and vmap; no sync.

    Args:
        x: float32, bfloat16 or float16, any shape with at least one element.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        dim: a scale per row along this dimension; None for one scale.
        power_of_two: round the scale down to a power of two.

    Returns:
        A `Quantized`.

    Raises:
        TypeError: x or dtype has another type or dtype.
        ValueError: x is empty.

    Example:
        >>> from funcamp import float8
        >>> values, scale = float8.quantize(torch.tensor([1.75, -0.5, 0.0]))
        >>> values.float(), scale
        (tensor([ 448., -128.,    0.]), tensor(256.))

    References:
        torchao/float8/float8_utils.py, pytorch/ao at 36027d8.
    """
    call = "float8.quantize"
    check_wide(call, "x", x)
    boolean(call, "power_of_two", power_of_two)
    if dtype not in LARGEST:
        raise TypeError(f"{call}: dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got {dtype!r}")
    if not x.numel():
        raise ValueError(f"{call}: x must have an element; got {_tree.describe(x)}")
    magnitudes = x.abs()
    amax = magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)
    scale = current_scale(amax.float(), dtype, power_of_two)
    largest = LARGEST[dtype]
    saturated = (x.float() * scale).clamp(-largest, largest)
    return Quantized(torch.where(torch.isfinite(x), saturated, torch.nan).to(dtype), scale)


def current_scale(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return f32(largest / max(f64(amax), 1e-12)), or the power of two below it."""
    scale = (LARGEST[dtype] / widen(amax).clamp(min=_SMALLEST_AMAX)).float()
    if not power_of_two:
        return scale
    mantissa, _ = torch.frexp(scale)  # exact, unlike the logarithm: in [0.5, 1)
    return torch.where(scale > 0, scale / (2 * mantissa), scale)


def check_wide(call: str, name: str, value: object) -> None:
    """Raise TypeError if this is not a tensor of a dtype that is quantized."""
    if not isinstance(value, Tensor) or value.dtype not in WIDE:
        raise TypeError(
            f"{call}: {name} must be a float32, bfloat16 or float16 tensor ({name}.float() makes one); "
            f"got {_tree.brief(value)}"
        )
