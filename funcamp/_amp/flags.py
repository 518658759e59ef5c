"""found_inf on one or more devices: combined on a device, or read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

#: found_inf for every device with gradients: float32, shape (), 1.0 or 0.0.
Flags = dict[torch.device, Tensor]


def combine_flags(flags: list[Tensor], device: torch.device) -> Tensor:
    """Combine flags into one, 1.0 or 0.0, on a device."""
    found_inf = _on(device, flags[0])
    for flag in flags[1:]:
        found_inf = torch.maximum(found_inf, _on(device, flag))
    return found_inf


def _on(device: torch.device, flag: Tensor) -> Tensor:
    """Return a flag on a device; the host waits for one that it will read."""
    return flag.to(device, non_blocking=device.type != "cpu")


def read_any(flags: Flags) -> bool:
    """Return on the host whether any flag is set; waits for the device."""
    return any(bool(flag != 0) for flag in flags.values())
