"""Masks of the gradients that are inf or NaN, and operations that replace what they mark."""

from __future__ import annotations

import math

from torch import Tensor

from funcamp.report.reruns import Call
from funcamp.report.tensors import WeakTensors, tensor_arguments
from funcamp.report.tracked import Tracked

_TESTS = {"isnan", "isinf"}
#: `isfinite` compares a tensor with itself, and its sizes with inf.
_COMPARISONS = {"eq", "ne"}
_COMBINATIONS = {"bitwise_not", "logical_not", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "mul"}
#: By the operation: the positions of the mask and of the gradient.
_REPLACING = {"masked_fill": (1, 0), "masked_fill_": (1, 0), "index_put_": (1, 0), "where": (0, 1)}


class OverflowMasks:
    """The masks of a run that mark inf and NaN in gradients, or all else.

    Args:
        tracked: which tensors are gradients.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._masks = WeakTensors()

    def follow(self, name: str, call: Call, result: object) -> None:
        """Remember the result of an operation if it is a mask. The name is that of the call."""
        if self._makes_mask(name, call):
            for tensor in tensor_arguments((result,)):
                self._masks.add(tensor)

    def is_replacement(self, name: str, call: Call) -> bool:
        """Return whether an operation replaces inf and NaN of gradients by numbers. The name is that of the call."""
        if name in ("nan_to_num", "nan_to_num_"):
            return self._is_gradient(call.arguments[0])
        if name not in _REPLACING or len(call.arguments) < 3:
            return False
        mask, gradient = [call.arguments[position] for position in _REPLACING[name]]
        gradients = call.arguments[1:] if name == "where" else [gradient]
        masks = tensor_arguments((mask,))
        return any(one in self._masks for one in masks) and any(map(self._is_gradient, gradients))

    def _makes_mask(self, name: str, call: Call) -> bool:
        """Return whether the result of an operation is a mask."""
        arguments = call.arguments
        if name in _TESTS:
            return self._is_gradient(arguments[0])
        if name in _COMPARISONS:
            is_with_inf = isinstance(arguments[1], float) and abs(arguments[1]) == math.inf
            return (is_with_inf or arguments[1] is arguments[0]) and self._is_gradient(arguments[0])
        return name in _COMBINATIONS and all(one in self._masks for one in arguments)

    def _is_gradient(self, argument: object) -> bool:
        power = self._tracked.power_of(argument) if isinstance(argument, Tensor) else None
        return power is not None and power.degree == 1
