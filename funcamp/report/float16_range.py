"""Float16 operations of the forward pass that get or make a number outside of float16's range."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.events import Event
from funcamp.report.lines import calling_line, is_called_by_funcamp, is_in_torchs_function
from funcamp.report.tensors import all_finite, smallest_and_largest, tensor_arguments
from funcamp.report.torch_names import Args, Kwargs, without_modes

#: Operations of a float16 tensor and a number whose result is inf if the number is beyond float16.
_WITH_CONSTANT = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "scalar_tensor"}
#: Operations by which a loop adds an epsilon.
_WITH_EPSILON = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_"}
#: Operations that raise if the number is beyond float16, so that they are checked before they run.
RAISING = {"masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full"}
_SUMS = {"add", "add_"}
#: Half of the smallest float16 number: a number that is not larger becomes zero.
_LARGEST_LOST = 2.0**-25
_LARGEST = torch.finfo(torch.float16).max
#: The numbers of a mask are not larger: -1e5 and a score, or less. Activations that grow are first just beyond float16.
_LARGEST_MASKED = -9e4
#: The numbers of a mask are about one number: each is at least this part of the largest.
_SPREAD = 0.9

#: The starts of the names of operations that make inf of finite numbers in any dtype (a division by zero, the logarithm
#: of zero), or whose values mean nothing.
_NO_OVERFLOWS = ("log", "div", "reciprocal", "rsqrt", "empty", "new_empty", "resize", "set_")


class Float16Range:
    """Reports the numbers of float16 operations that float16 cannot represent.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit

    def check_before(self, name: str, args: Args, keywords: Kwargs) -> None:
        """Report a constant of an operation of `RAISING` before it runs."""
        dtype = keywords.get("dtype")
        if dtype is None and args and isinstance(args[0], Tensor):
            dtype = args[0].dtype
        if dtype == torch.float16:
            self._report_constant(name, args)

    def check_result(self, name: str, args: Args, result: Tensor) -> None:
        """Report an epsilon that float16 loses, or the reason if the result is not finite."""
        if name in _WITH_EPSILON:
            self._report_epsilon(name, args)
        if all_finite(result) or (name in _WITH_CONSTANT and self._report_constant(name, args)):
            return
        self._report_nonfinite(name, args, result)

    def _report_epsilon(self, name: str, args: Args) -> None:
        """Report an epsilon that is zero in float16. Defaults of torch's own functions are no finding."""
        for value in _numbers_in(args):
            if 0 < abs(value) <= _LARGEST_LOST and not is_in_torchs_function():
                self._emit(events.ConstantUsed(calling_line(), name, value))

    def _report_constant(self, name: str, args: Args) -> bool:
        """Report a constant beyond float16, and return whether there is one."""
        for value in _numbers_in(args):
            if _LARGEST < abs(value) < math.inf:
                self._emit(events.ConstantUsed(calling_line(), name, value))
                return True
        return False

    def _report_nonfinite(self, name: str, args: Args, result: Tensor) -> None:
        """Report an operation that made inf or NaN of finite numbers, unless that is meant or expected."""
        # What an operation in place has written over is not known.
        inputs = [one for one in tensor_arguments(args) if one.is_floating_point() and one is not result]
        numbers = _numbers_in(args)
        is_in_place = any(one is result for one in args)
        if not (inputs or is_in_place) or not all(map(math.isfinite, numbers)):
            return
        smallest, largest = smallest_and_largest(inputs)
        is_made_here = math.isfinite(smallest) and math.isfinite(largest)
        if not is_made_here or _is_masking(name, inputs, numbers, result):
            return
        # A step of funcamp scales and casts, and handles an overflow itself.
        if not (name.startswith(_NO_OVERFLOWS) or _is_negative_power(name, numbers) or is_called_by_funcamp()):
            self._emit(events.Overflowed(calling_line(), _label(name), (smallest, largest)))


def _label(name: str) -> str:
    """Return an operation's name as a user knows it."""
    return "cast to float16" if name == "_to_copy" else name


def _numbers_in(args: Args) -> list[float]:
    """Return the numbers among arguments, without flags."""
    return [float(one) for one in args if isinstance(one, (int, float)) and not isinstance(one, bool)]


def _is_negative_power(name: str, numbers: list[float]) -> bool:
    return name.startswith("pow") and min(numbers, default=0) < 0


def _is_masking(name: str, inputs: list[Tensor], numbers: list[float], result: Tensor) -> bool:
    """Return whether an operation casts or adds a mask, whose large negative numbers become -inf."""
    if name != "_to_copy" and name not in _SUMS:
        return False
    with without_modes(), torch.no_grad():
        if (torch.isposinf(result) | torch.isnan(result)).any():
            return False
        if name == "_to_copy":
            masked = inputs[0][torch.isneginf(result)]
            return bool(masked.max() <= min(_LARGEST_MASKED, _SPREAD * masked.min().item()))
        smallest = min([*numbers, *[tensor.min().item() for tensor in inputs if tensor.numel()]])
    return smallest <= -_LARGEST
