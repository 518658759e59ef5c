"""The names of parameters in modules that run, or that calling functions have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn

from funcamp.report.tensors import address_of

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


def name_of_parameter(parameter: Tensor) -> str:
    """Return the name of a parameter in a module that a calling function has; its shape if none has it."""
    for module in _modules_of_callers():
        for name, found in module.named_parameters():
            if found is parameter:
                return name
    return f"a parameter of shape {tuple(parameter.shape)}"


def _modules_of_callers() -> Iterator[nn.Module]:
    """Yield the modules among the variables of calling functions, and among the attributes of their `self`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        variables = frame.f_locals
        attributes = getattr(variables.get("self"), "__dict__", {})
        for value in [*variables.values(), *attributes.values()]:
            if isinstance(value, nn.Module):
                yield value
        frame = frame.f_back


def _running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose code runs now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back
