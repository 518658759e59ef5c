"""The memory and the values of a run's tensors, read so that no mode observes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

from funcamp.report.torch_names import is_wrapped, without_modes


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor with values: no wrapper of torch.func, no subclass but Parameter."""
    if not isinstance(value, Tensor) or is_wrapped(value) or type(value) not in (Tensor, nn.Parameter):
        return False
    if value.layout is not torch.strided or value.device.type == "meta" or value.is_nested:
        return False
    # FSDP frees the memory of parameters between their uses.
    return not value.numel() or value.untyped_storage().nbytes() > 0


def address_of(value: object) -> int:
    """Return the address of a plain tensor's memory; 0 for anything else."""
    if not is_plain(value):
        return 0
    return int(value.untyped_storage().data_ptr())


def overlap(first: object, second: object) -> bool:
    """Return whether two plain tensors of one memory may share an element."""
    if not is_plain(first) or not is_plain(second):
        return False
    (first_start, first_end), (second_start, second_end) = _bytes_of(first), _bytes_of(second)
    return first_start < second_end and second_start < first_end


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def all_finite(tensor: object) -> bool:
    """Return whether a plain tensor is finite; True for anything else. Waits for the device."""
    if not is_plain(tensor) or not tensor.is_floating_point():
        return True
    with without_modes(), torch.no_grad():
        if tensor.dtype == torch.float16:  # its sum is finite in float32
            return math.isfinite(tensor.sum(dtype=torch.float32).item())
        values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 has no product
        return float((values * 0).sum()) == 0  # inf and NaN times 0 are NaN; `isfinite` takes several times as long


def smallest_and_largest(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Return the smallest and the largest number of tensors, NaN if one is NaN; 0 without any. Waits for the device."""
    bounds: list[float] = []
    with without_modes(), torch.no_grad():
        for tensor in tensors:
            if tensor.numel() and is_plain(tensor):
                values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 has no minimum
                bounds += [bound.item() for bound in torch.aminmax(values)]
    if any(map(math.isnan, bounds)):
        return math.nan, math.nan
    return min(bounds, default=0.0), max(bounds, default=0.0)


def is_zero(gradient: Tensor | None) -> bool:
    """Return whether there is no gradient, or a plain one of zeros, however it was cleared. Waits for the device."""
    if gradient is None:
        return True
    if not address_of(gradient):
        return False
    with without_modes(), torch.no_grad():
        return not gradient.any()


def tensors_in(nested: object) -> list[Tensor]:
    """Return a tensor, the tensors of nested iterables, or those that an iterator yields, which is used up."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Iterator):
        return list(nested)
    if not isinstance(nested, Iterable):
        return []
    return [tensor for part in nested for tensor in tensors_in(part)]


def tensor_arguments(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors among an operation's arguments, and in lists of them."""
    tensors = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += [part for part in argument if isinstance(part, Tensor)]
    return tensors
