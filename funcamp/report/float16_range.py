"""Float16 operations of the forward pass that get or make a number outside of float16's range."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.events import Event
from funcamp.report.lines import calling_line, is_called_by_funcamp, is_in_torchs_function
from funcamp.report.lost_epsilons import LostEpsilon, LostEpsilons
from funcamp.report.proposals import propose, propose_for_constant, propose_for_epsilon
from funcamp.report.reruns import Call, range_of
from funcamp.report.tensors import all_finite, tensor_arguments
from funcamp.report.weight_names import name_of_weight
from funcamp._types import Args
from funcamp._upstream.modes import without_modes

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
#: A number that is not larger belongs to a mask, because no activation is so large.
_SURELY_MASK = -1e6

#: The starts of the names of operations that make inf of finite numbers in any dtype (a division by zero, the logarithm
#: of zero), or whose values mean nothing.
_NO_OVERFLOWS = ("log", "div", "reciprocal", "rsqrt", "empty", "new_empty", "resize", "view", "set_")


class Float16Range:
    """Reports the numbers of float16 operations that float16 cannot represent.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._lost_epsilons = LostEpsilons()
        self._has_mask = False
        """Whether a mask has become -inf, which may make NaN in later operations."""
        self.nonfinite_input = ""
        """The first float16 operation of the run with inf or NaN in an input; empty without one."""

    def check_before(self, call: Call) -> None:
        """Report a constant of an operation of `RAISING` before it runs."""
        if _is_float16(call):
            self._report_constant(call)

    def check_result(self, call: Call, result: Tensor) -> None:
        """Report the reason if a float16 operation loses an epsilon, or its result is not finite."""
        if self._report_lost_epsilon(call, result):
            return
        if all_finite(result):
            self._lost_epsilons.follow(call, result)
            return
        is_reported = call.name in _WITH_CONSTANT and self._report_constant(call)
        if not is_reported:
            self._report_nonfinite(call, result)

    def _report_lost_epsilon(self, call: Call, result: Tensor) -> bool:
        """Report an epsilon that is zero in float16, and return whether there is one."""
        if call.name not in _WITH_EPSILON:
            return False
        for value in _numbers_in(call.arguments):
            if 0 < abs(value) <= _LARGEST_LOST:
                line = calling_line()
                self._lost_epsilons.note(call, value, line, result)
                if not is_in_torchs_function():  # torch's own defaults matter only if a division meets a zero
                    self._emit(events.ConstantUsed(line, call.name, value))
                return True
        return False

    def _report_constant(self, call: Call) -> bool:
        """Report a constant beyond float16, and return whether there is one."""
        for value in _numbers_in(call.arguments):
            if _LARGEST < abs(value) < math.inf:
                make_proposal = functools.partial(propose_for_constant, call, value)
                self._emit(events.ConstantUsed(calling_line(), call.name, value, make_proposal=make_proposal))
                return True
        return False

    def _report_nonfinite(self, call: Call, result: Tensor) -> None:
        """Report an operation that made inf or NaN of finite numbers, unless that is meant or expected."""
        inputs = [tensor for tensor in tensor_arguments(call.arguments) if tensor.is_floating_point()]
        numbers = _numbers_in(call.arguments)
        if not inputs or not all(map(math.isfinite, numbers)):
            return
        if not all(map(all_finite, inputs)):
            self._note_nonfinite_input(call, inputs)
            return
        if _is_masking(call.name, inputs, numbers, result):
            self._has_mask = True
            return
        if is_called_by_funcamp():  # a step of funcamp scales and casts, and handles an overflow itself
            return
        lost = self._lost_epsilons.behind(call)
        if lost is not None:
            self._report_division(call, inputs, lost)
        elif not call.name.startswith(_NO_OVERFLOWS) and not (
            call.name.startswith("pow") and min(numbers, default=0) < 0
        ):
            self._report_overflow(call, inputs)

    def _note_nonfinite_input(self, call: Call, inputs: list[Tensor]) -> None:
        """Remember the first operation that gets inf or NaN. An input of -inf may be a mask."""
        if self.nonfinite_input or self._has_mask:
            return
        largest = range_of(inputs).largest
        if not largest < math.inf:
            kind = "inf" if largest == math.inf else "NaN"
            self.nonfinite_input = f"{kind} is in an input of {call.label} at {calling_line()} already"

    def _report_overflow(self, call: Call, inputs: list[Tensor]) -> None:
        """Report an operation that makes inf or NaN of finite numbers."""
        make_proposal = functools.partial(propose, call, name_of_weight)
        self._emit(events.Overflowed(calling_line(), call.label, range_of(inputs), make_proposal=make_proposal))

    def _report_division(self, call: Call, inputs: list[Tensor], lost: LostEpsilon) -> None:
        """Report an operation that makes inf or NaN because an epsilon is zero."""
        make_proposal = functools.partial(propose_for_epsilon, call, lost.run, lost.epsilon)
        cause = f"the epsilon of {lost.epsilon:g} at {lost.line} is zero in float16"
        input_range = range_of(inputs)
        line = calling_line()
        self._emit(events.Overflowed(line, call.label, input_range, cause, lost.line, make_proposal=make_proposal))


def _numbers_in(arguments: Args) -> list[float]:
    """Return the numbers among arguments, without flags."""
    return [
        float(argument)
        for argument in arguments
        if isinstance(argument, (int, float)) and not isinstance(argument, bool)
    ]


def _is_float16(call: Call) -> bool:
    """Return whether the result of an operation that fills a tensor will be float16."""
    dtype = call.keywords.get("dtype")
    if dtype is None and call.arguments and isinstance(call.arguments[0], Tensor):
        dtype = call.arguments[0].dtype
    return bool(dtype == torch.float16)


def _is_masking(name: str, inputs: list[Tensor], numbers: list[float], result: Tensor) -> bool:
    """Return whether an operation casts or adds a mask, whose large negative numbers become -inf."""
    if name != "_to_copy" and name not in _SUMS:
        return False
    with without_modes(), torch.no_grad():
        if (torch.isposinf(result) | torch.isnan(result)).any():
            return False
        if name == "_to_copy":
            return _is_mask(inputs[0], torch.isneginf(result))
        smallest = min([*numbers, *[tensor.min().item() for tensor in inputs if tensor.numel()]])
    return smallest <= -_LARGEST


def _is_mask(values: Tensor, is_beyond: Tensor) -> bool:
    """Return whether a tensor is a mask and no activation.

    The values beyond float16 are one number, and it is very large or the other values are one number too.
    """
    masked = values[is_beyond]
    others = values[~is_beyond]
    is_one_number = bool((masked == masked[0]).all())
    return is_one_number and bool(masked[0] <= _SURELY_MASK or (others == others[:1]).all())
