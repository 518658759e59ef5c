"""The names of parameters in the outermost module that runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn

from funcamp._audit.tensors import address_of

#: In place of a name that is not found.
_UNKNOWN = "the weight's name"


def name_of_weight(weight: Tensor) -> str:
    """Return the name of a parameter, or of a view of one, in the outermost module that runs now."""
    name = _UNKNOWN
    for module in _running_modules():
        for found, parameter in module.named_parameters():
            if address_of(parameter) == address_of(weight):
                name = found
    return name


def _running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose code runs now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back
