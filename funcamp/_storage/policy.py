"""The precision policy: the dtype of torch.autocast around the loss of a step.

The loss gets the parameters as they are stored, in their own dtype. Autocast casts a weight at its first use in a
region and keeps the cast until the region ends, so the gradients of several uses are summed in the low precision before
they reach the float32 weight. This is the only place that decides a dtype, and all dtypes are those of torch's loop.
"""

from __future__ import annotations

import contextlib

import torch

from funcamp._types import name_of
from funcamp._upstream.encoder_kernels import without_encoder_kernels

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def check_policy(call: str, policy: object) -> torch.dtype:
    """Return the dtype of a policy, given as a dtype or by its name; float32, without autocast, for None.

    Raises:
        TypeError: policy is anything else.
        ValueError: policy is another dtype, or not the name of one of the three.
    """
    if policy is None:
        return torch.float32
    name = name_of(policy) if isinstance(policy, torch.dtype) else policy
    if not isinstance(name, str):
        raise TypeError(f"{call}: policy must be a string, a torch.dtype or None; got {policy!r}")
    if name not in _DTYPES:
        raise ValueError(f"{call}: policy must be one of {', '.join(_DTYPES)}; got {policy!r}")
    return _DTYPES[name]


def autocast_of(policy: torch.dtype, device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return the region in which a loss computes, also inside of a caller's; none for a policy without a low dtype."""
    if policy == torch.float32 or device_type == "meta":  # autocast does not know the meta device
        return contextlib.nullcontext()
    region = torch.autocast(device_type, policy)
    # Dynamo does not trace the switch of these kernels.
    if device_type == "cpu" and not torch.compiler.is_dynamo_compiling():
        return without_encoder_kernels(region)
    return region
