"""The precision policy: the dtype of torch.autocast around the loss of a step.

The loss gets the parameters as they are stored, in their own dtype. Autocast casts a weight at its first use in a
region and keeps the cast until the region ends, so the gradients of several uses are summed in the low precision before
they reach the float32 weight. This is the only place that decides a dtype, and all dtypes are those of torch's loop.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from funcamp._types import name_of
from funcamp._upstream.encoder_kernels import without_encoder_kernels

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Policy:
    """The precision in which the loss of a step computes.

    The loss gets the parameters themselves, in their own dtype, and runs under torch.autocast, which casts activations
    and float32 weights at their use: those of linear layers, convolutions and products, not those of embeddings and
    norms.

    Args:
        compute_dtype: torch.float16, torch.bfloat16, or torch.float32 for no autocast.

    Raises:
        TypeError: compute_dtype is not a torch.dtype.
        ValueError: compute_dtype is another dtype.

    Example:
        >>> str(Policy(torch.bfloat16))
        'bfloat16'
    """

    compute_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not isinstance(self.compute_dtype, torch.dtype):
            raise TypeError(f"Policy: compute_dtype must be a torch.dtype; got {self.compute_dtype!r}")
        if self.compute_dtype not in _DTYPES.values():
            raise ValueError(f"Policy: compute_dtype must be one of {', '.join(_DTYPES)}; got {self.compute_dtype}")

    def __str__(self) -> str:
        return name_of(self.compute_dtype)


def check_policy(call: str, policy: object) -> Policy:
    """Return the policy, created from the name of a dtype, a dtype or None if needed.

    Raises:
        TypeError: policy is anything else.
        ValueError: policy is a text that is not the name of one of the three dtypes, or another dtype.
    """
    if isinstance(policy, str):
        if policy not in _DTYPES:
            raise ValueError(f"{call}: policy must be one of {', '.join(_DTYPES)}; got {policy!r}")
        return Policy(_DTYPES[policy])
    if policy is None or isinstance(policy, torch.dtype):
        return Policy(policy or torch.float32)
    if not isinstance(policy, Policy):
        raise TypeError(f"{call}: policy must be a Policy, a string, a torch.dtype or None; got {policy!r}")
    return policy


def autocast_of(policy: Policy, device_type: str) -> contextlib.AbstractContextManager[object]:
    """Return the region in which a loss computes, also inside of a caller's; none for a policy without a low dtype."""
    if policy.compute_dtype == torch.float32 or device_type == "meta":  # autocast does not know the meta device
        return contextlib.nullcontext()
    region = torch.autocast(device_type, policy.compute_dtype)
    # Dynamo does not trace the switch of these kernels.
    if device_type == "cpu" and not torch.compiler.is_dynamo_compiling():
        return without_encoder_kernels(region)
    return region
