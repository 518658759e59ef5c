"""The step of a fused optimizer: its kernel gets the scale and the flag, and skips by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._amp.flags import Flags, combine_flags, read_any
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
    momenta_before = _momenta(optimizer)
    grad_scale = getattr(optimizer, "grad_scale", None)  # as in torch, one that is set already is a further factor
    if not is_unscaled:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = combine_flags(list(flags.values()) or [torch.zeros_like(scale)], scale.device)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    begun = _momenta(optimizer) - momenta_before
    if begun and read_any(flags):
        for param in begun:
            del optimizer.state[param]["momentum_buffer"]
    return result


def _momenta(optimizer: Any) -> set[Tensor]:
    """Return the parameters for which SGD keeps a momentum: only SGD begins a state in a step that it skips."""
    if not isinstance(optimizer, torch.optim.SGD):
        return set()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {param for param in params if optimizer.state.get(param, {}).get("momentum_buffer") is not None}
