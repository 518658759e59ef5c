"""The step of a fused optimizer: its kernel gets the scale and the flag, and skips by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._amp.undo import Flags, combine_flags, entries, forget, read_any
from funcamp._types import Args, Kwargs


def fused_step(
    optimizer: Any,
    scale: Tensor,
    flags: Flags,
    *,
    is_unscaled: bool,
    args: Args,
    kwargs: Kwargs,
) -> object:
    """Step an optimizer whose step reads its attributes grad_scale and found_inf; return its result.

    is_unscaled: whether the gradients are unscaled already; otherwise the kernel divides them by scale.
    """
    entries_before = None
    if isinstance(optimizer, torch.optim.SGD):  # only SGD writes a first state in a step that it skips
        entries_before = entries(optimizer)
    grad_scale = getattr(optimizer, "grad_scale", None)  # as in torch, one that is set already is a further factor
    if not is_unscaled:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = combine_flags(list(flags.values()) or [torch.zeros_like(scale)], scale.device)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    if entries_before is not None and entries(optimizer) != entries_before and read_any(flags):
        forget(optimizer, entries_before)
    return result
