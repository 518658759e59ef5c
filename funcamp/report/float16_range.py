"""Float16 operations of the forward pass that get or make a number outside of float16's range."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.events import Event
from funcamp.report.lines import calling_line, is_called_by_torch
from funcamp.report.tensors import all_finite, smallest_and_largest, tensor_arguments
from funcamp.report.torch_names import Args, Kwargs

#: Operations of a float16 tensor and a number whose result is inf if the number is beyond float16.
_WITH_CONSTANT = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "scalar_tensor"}
#: Operations by which a loop adds an epsilon.
_WITH_EPSILON = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_"}
#: Operations that raise if the number is beyond float16, so that they are checked before they run.
RAISING = {"masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full"}
#: Half of the smallest float16 number: a number that is not larger becomes zero.
_LARGEST_LOST = 2.0**-25
_LARGEST = torch.finfo(torch.float16).max
#: The starts of the names of operations whose values mean nothing.
_UNINITIALIZED = ("empty", "new_empty", "resize", "set_")


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
            if 0 < abs(value) <= _LARGEST_LOST and not is_called_by_torch():
                self._emit(events.ConstantUsed(calling_line(), name, value))

    def _report_constant(self, name: str, args: Args) -> bool:
        """Report a constant beyond float16, and return whether there is one."""
        for value in _numbers_in(args):
            if _LARGEST < abs(value) < math.inf:
                self._emit(events.ConstantUsed(calling_line(), name, value))
                return True
        return False

    def _report_nonfinite(self, name: str, args: Args, result: Tensor) -> None:
        """Report an operation that made inf or NaN of finite numbers."""
        # What an operation in place has written over is not known.
        inputs = [one for one in tensor_arguments(args) if one.is_floating_point() and one is not result]
        is_in_place = any(one is result for one in args)
        if not (inputs or is_in_place) or not all(map(math.isfinite, _numbers_in(args))):
            return
        smallest, largest = smallest_and_largest(inputs)
        is_made_here = math.isfinite(smallest) and math.isfinite(largest)
        if is_made_here and not name.startswith(_UNINITIALIZED):
            self._emit(events.Overflowed(calling_line(), _label(name), (smallest, largest)))


def _label(name: str) -> str:
    """Return an operation's name as a user knows it."""
    return "cast to float16" if name == "_to_copy" else name


def _numbers_in(args: Args) -> list[float]:
    """Return the numbers among arguments, without flags."""
    return [float(one) for one in args if isinstance(one, (int, float)) and not isinstance(one, bool)]
