"""What a loop adds to gradients that is not times the scale: parameters, noise, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from funcamp.report.reruns import Call
from funcamp.report.tensors import WeakTensors, tensor_arguments
from funcamp.report.tracked import Tracked

_NOISE = {"randn", "randn_like", "rand", "rand_like", "normal", "uniform"}
#: Operations whose result is not times the scale if no argument is.
_KEPT = {"mul", "div", "add", "sub", "neg", "sign", "sgn", "abs", "clone", "detach", "alias", "_to_copy", "view"}


class Addends:
    """The tensors of a run that are certainly not times the scale.

    A factor that may contain the scale makes a tensor uncertain: another tensor, or a number of 1 or more. A weight
    decay and a standard deviation are smaller.

    Args:
        tracked: which tensors are parameters.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._known = WeakTensors()
        """The tensors that are computed from parameters or are noise."""

    def follow(self, name: str, call: Call, result: object) -> None:
        """Remember the result of an operation, if it is not times the scale.

        name: the operation, without what marks it as in place or for a list.
        """
        if name in _NOISE or (name in _KEPT and self._keeps(call)):
            for tensor in tensor_arguments((result,)):
                self._known.add(tensor)

    def among(self, arguments: Iterable[object]) -> bool:
        """Return whether one of an operation's arguments is certainly not times the scale."""
        return any(map(self._is_known, tensor_arguments(arguments)))

    def _keeps(self, call: Call) -> bool:
        """Return whether an operation has only arguments that are not times the scale."""
        tensors = tensor_arguments(call.arguments)
        if not tensors or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return False  # an operation of a loss
        return has_small_factors(call) and all(map(self._is_known, tensors))

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor in self._known or self._tracked.is_parameter(tensor)


def has_small_factors(call: Call) -> bool:
    """Return whether the numbers by which an operation multiplies are smaller than 1, and so not the scale."""
    numbers = [one for one in (*call.arguments, call.keywords.get("alpha")) if isinstance(one, (int, float))]
    if "div" in call.name:
        return all(abs(number) > 1 for number in numbers)
    return all(abs(number) < 1 for number in numbers)
