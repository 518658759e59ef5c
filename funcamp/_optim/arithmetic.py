"""Arithmetic of tensors with a number: a float, or a tensor of shape () where torch takes a float only.

A number decides no dtype. float16 and bfloat16 are computed in float32 and rounded once. Both are what torch's kernels
do with a float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from funcamp._trace.tracing import compiling

#: A float, or a tensor of shape () in the dtype of `widen`.
Number: TypeAlias = "float | Tensor"
NARROW = (torch.float16, torch.bfloat16)


def is_zero(number: Number) -> bool:
    """Return whether a number is the constant 0."""
    return not isinstance(number, Tensor) and number == 0


def times(tensor: Tensor, number: Number) -> Tensor:
    """Return tensor * number."""
    return _rounded(lambda n, x: x * n, number, tensor)


def over(tensor: Tensor, number: Number) -> Tensor:
    """Return tensor / number."""
    return _rounded(lambda n, x: x / n, number, tensor)


def plus(tensor: Tensor, number: Number) -> Tensor:
    """Return tensor + number."""
    if not isinstance(number, Tensor):
        return tensor + number  # torch's kernel for a CPU rounds the number to bfloat16 first
    return _rounded(lambda n, x: x + n, number, tensor)


def add(tensor: Tensor, other: Tensor, alpha: Number) -> Tensor:
    """Return tensor + alpha * other."""
    if not isinstance(alpha, Tensor):
        return torch.add(tensor, other, alpha=alpha)
    if tensor.dtype in NARROW and tensor.device.type == "cpu":
        alpha = alpha.to(tensor.dtype)  # as torch's kernel for a CPU
    return _rounded(lambda n, x, y: x + n * y, alpha, tensor, other)


def addcmul(tensor: Tensor, left: Tensor, right: Tensor, value: Number) -> Tensor:
    """Return tensor + value * left * right."""
    if isinstance(value, Tensor):
        return _rounded(lambda n, x, y, z: x + n * y * z, value, tensor, left, right)
    return torch.addcmul(tensor, left, right, value=value)


def addcdiv(tensor: Tensor, left: Tensor, right: Tensor, value: Number) -> Tensor:
    """Return tensor + value * left / right."""
    # Also for a float: Dynamo takes torch.addcdiv apart in another order, which rounds otherwise.
    return _rounded(lambda n, x, y, z: x + n * y / z, value, tensor, left, right)


def lerp(start: Tensor, end: Tensor, weight: Number) -> Tensor:
    """Return start + weight * (end - start)."""
    if isinstance(weight, Tensor):
        return _rounded(lambda n, x, y: torch.lerp(x, y, n), weight, start, end)
    return torch.lerp(start, end, weight)


def clamp(tensor: Tensor, low: Number, high: Number | None = None) -> Tensor:
    """Return the tensor with elements between two numbers, which are rounded to its dtype."""
    tensor = torch.maximum(tensor, like(low, tensor))
    return tensor if high is None else torch.minimum(tensor, like(high, tensor))


def like(number: Number, tensor: Tensor) -> Tensor:
    """Return a number in the dtype of a tensor; made on its device: a CUDA graph takes no copy from the host."""
    if isinstance(number, Tensor):
        return number.to(tensor.device, tensor.dtype)
    return torch.full((), number, dtype=tensor.dtype, device=tensor.device)


def _rounded(compute: Callable[..., Tensor], number: Number, *tensors: Tensor) -> Tensor:
    """Return compute(number, *tensors), rounded once to the dtype of the tensors."""
    dtype = tensors[0].dtype
    computed_in = torch.float32 if dtype in NARROW else dtype
    if isinstance(number, Tensor):
        number = number.to(computed_in)
        if compiling():
            number = computed_once(number)
    return compute(number, *[tensor.to(computed_in) for tensor in tensors]).to(dtype)


def computed_once(value: Tensor) -> Tensor:
    """Make a compiler compute a small tensor once instead of at every use.

    Inductor inlines a scalar's arithmetic, also powers and divisions, into the loop over the parameters that reads it.
    A strided view makes it a buffer; tests/jit/test_fusion.py fails if that changes. The value must not itself be a
    view, because torch 2.11's Inductor forgets the offset of a view in such a strided view.
    """
    return value.as_strided(value.shape, value.stride())
