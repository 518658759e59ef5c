"""The operations of the script's own code, and which of them are looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from funcamp.report.float16_range import RAISING, Float16Range
from funcamp.report.gradient_operations import LOOKED_AT, GradientOperations
from funcamp.report.mode import Run
from funcamp.report.tensors import tensor_arguments
from funcamp.report.torch_names import Args, Kwargs

if TYPE_CHECKING:
    from torch._ops import OpOverload


class _Looks(NamedTuple):
    """What is to be looked at in the calls of an operation."""

    name: str
    at_gradients: bool
    at_range_before: bool
    at_range: bool
    """Not for views, which compute nothing."""


@functools.cache
def _looks_at(function: OpOverload) -> _Looks:
    """Return what is to be looked at in the calls of an operation."""
    name = function._schema.name.split("::")[1]
    return _Looks(name, name in LOOKED_AT, name in RAISING, not function.is_view)


class Operations:
    """Looks at the operations of the script's own code.

    Args:
        gradients: gets those on gradients.
        float16: gets those with a float16 result.
        is_hidden: returns whether the operations that run now are those of a scaler, an optimizer, torch's clipping or
            a backward pass.
    """

    def __init__(self, gradients: GradientOperations, float16: Float16Range, is_hidden: Callable[[], bool]) -> None:
        self._gradients = gradients
        self._float16 = float16
        self._is_hidden = is_hidden

    def look(self, func: OpOverload, args: Args, keywords: Kwargs, run: Run) -> object:
        """Run an operation, and look at its arguments and its result if a rule needs it."""
        if self._is_hidden():
            return run(func, args, keywords)
        looks = _looks_at(func)
        if looks.at_range_before:
            self._float16.check_before(looks.name, args, keywords)
        result = run(func, args, keywords)
        if looks.at_gradients:
            self._gradients.check(looks.name, args, result)
        if looks.at_range:
            for output in (result,) if isinstance(result, Tensor) else tensor_arguments((result,)):
                if output.dtype == torch.float16:
                    self._float16.check_result(looks.name, args, output)
                    break
        return result
