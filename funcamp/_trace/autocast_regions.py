"""The torch.autocast regions around a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_ACCELERATOR = torch.accelerator.current_accelerator()
_DEVICE_TYPES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)


def autocast_regions() -> tuple[tuple[str, torch.dtype], ...] | None:
    """Return the device types with an autocast around the call and its dtypes; None without autocast."""
    if not any(map(torch.is_autocast_enabled, _DEVICE_TYPES)):  # every call of a jitted step asks
        return None
    enabled = [device_type for device_type in _DEVICE_TYPES if torch.is_autocast_enabled(device_type)]
    return tuple((device_type, torch.get_autocast_dtype(device_type)) for device_type in enabled)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Context manager: disable every autocast around the call."""
    with contextlib.ExitStack() as stack:
        for device_type, _ in autocast_regions() or ():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
