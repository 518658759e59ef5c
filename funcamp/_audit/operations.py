"""Operations as events: reads and writes of gradients, and float16 numbers that do not fit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._audit import events
from funcamp._audit.events import Event
from funcamp._audit.lines import calling_line, is_called_by_funcamp
from funcamp._audit.lost_epsilons import LostEpsilon, LostEpsilons
from funcamp._audit.powers import USES, Power, degree_of
from funcamp._audit.proposals import (
    Call,
    operator_name,
    propose,
    propose_for_constant,
    propose_for_epsilon,
    range_of,
    recorded,
)
from funcamp._audit.tracked import Tracked
from funcamp._audit.weight_names import name_of_weight

_without_modes = _upstream.find("torch._C._DisableTorchDispatch")
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as _Mode
else:
    _Mode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")

#: Statistics. A check for inf and NaN is none: its `abs` is compared for equality only.
_READS = {"norm", "linalg_vector_norm", "_foreach_norm", "sum", "mean", "max", "amax", "min", "std", "var", "pow"}
_READS |= {"_local_scalar_dense", "square", "dot", "histc"}
_COPIES = {"copy_", "_foreach_copy_"}
_WRITES = {"mul_", "div_", "_foreach_mul_", "_foreach_div_", *_COPIES}
_WRITES |= {"_amp_foreach_non_finite_check_and_unscale_"}
_CLIPS = {
    "clamp",
    "clamp_min",
    "clamp_max",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
}
#: Writes that are no unscaling if the factor is a tensor of the gradient's shape.
_PRODUCTS = {"mul_", "div_"}
_ZEROS = {"zero_", "_foreach_zero_"}
_OF_GRADIENTS = _WRITES | _CLIPS | _ZEROS

#: Operations that read a loss, or divide it.
_OF_LOSSES = {"_local_scalar_dense", "div", "mul"}

#: Operations whose result has their constant, with a float16 tensor.
_WITH_CONSTANT = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "scalar_tensor"}
#: Those of an epsilon.
_WITH_EPSILON = {"add", "add_", "clamp_min", "clamp_min_", "clamp", "clamp_"}
#: Those that raise for a constant beyond float16.
_RAISING = {"masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full"}
_SUMS = {"add", "add_"}
#: Half of the smallest float16 number; what is not larger rounds to zero.
_EPSILON = 2.0**-25
_LARGEST = torch.finfo(torch.float16).max
#: What is not larger is a mask's, and no activation.
_SURELY_MASK = -1e6

#: Operations that make inf of finite numbers in any dtype, or whose values mean nothing.
_DIVISIONS = ("log", "div", "reciprocal", "rsqrt")
_NO_OVERFLOWS = (*_DIVISIONS, "empty", "new_empty", "resize", "view", "set_")


class Operations(_Mode):
    """A dispatch mode that turns operations of the user's code into events.

    Args:
        emit: gets each event.
        tracked: which tensors are gradients.
        is_hidden: whether operations are those of a scaler, an optimizer, torch's clipping or a backward pass.
    """

    def __init__(self, emit: Callable[[Event], None], tracked: Tracked, is_hidden: Callable[[], bool]) -> None:
        for private_name in (_without_modes, _Mode):
            _upstream.check(private_name)
        super().__init__()  # type: ignore[no-untyped-call]
        self._emit = emit
        self._tracked = tracked
        self._is_hidden = is_hidden
        self._numbers = itertools.count()
        """Of reads."""
        self._lost_epsilons = LostEpsilons()
        self._has_mask = False
        """Whether -inf came of a mask."""
        self.nonfinite_input = ""
        """The first float16 operation of the run whose input was inf or NaN already; empty without one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self._is_hidden():
            return func(*args, **keywords)
        name = operator_name(func)
        if name in _RAISING and _is_float16(args, keywords):
            self._find_constant(Call(func, args, keywords))
        call = recorded(func, args, keywords)
        result = func(*args, **keywords)
        if name in _OF_LOSSES:
            self._find_loss(args[0])
        if not (name in _OF_GRADIENTS and self._find_gradients(name, args)):
            self._find_reads(name, args, result)
        for output in _tensors_in([result]):
            if output.dtype == torch.float16:
                self._find_misfits(call, output)
                break
        return result

    def _find_loss(self, tensor: Any) -> None:
        """Report a scaled loss that is read or divided."""
        scaling = self._tracked.scaling_of(tensor)
        if scaling is not None:
            self._emit(events.ScaledLossRead(calling_line(), scaling.scaler, scaling.updates))

    def _find_gradients(self, name: str, args: Any) -> bool:
        """Report what an operation writes into gradients, or clips of them, and return whether there are some."""
        tensors = _tensors_in(args)
        keys = self._tracked.gradients_among(tensors[:1] if name.endswith("_") and name[0] != "_" else tensors)
        if not keys:
            return False
        if name in _CLIPS:
            self._emit(events.Clipped(calling_line(), keys))
        elif name in _ZEROS:
            self._emit(events.Cleared(calling_line(), keys, None))
        elif not (name in _PRODUCTS and _is_mask(args[1])):
            reduced = self._tracked.where_reduced(_tensors_in(args[1:2])) if name in _COPIES else None
            if reduced is not None:
                self._emit(events.Reduced(reduced, keys))
            self._emit(events.GradientWritten(calling_line(), keys))
        return True

    def _find_reads(self, name: str, args: Any, result: Any) -> None:
        """Report a norm or another statistic of gradients, and what becomes of it."""
        powers = [self._tracked.power_of(argument) for argument in args]
        known = [power for power in powers if power is not None]
        if not known:
            return
        writes, name = name.endswith("_"), name.removesuffix("_")
        degree = degree_of(name, args, powers, self._tracked.scales)
        if degree is None:
            if writes:  # the loop may have unscaled a copy
                self._tracked.drop_powers(_tensors_in(args[:1]))
            return
        parameters = tuple([key for power in known for key in power.parameters])
        reads = tuple([read for power in known for read in power.reads])
        if name in _READS and not reads:
            reads = (next(self._numbers),)
            self._emit(events.GradientRead(calling_line(), parameters, reads[0]))
        if not degree:
            self._emit(events.ReadsCancelled(calling_line(), reads))
        elif name in USES:
            self._emit(events.ReadsUsed(calling_line(), reads))
        else:
            for tensor in _tensors_in([result]):
                self._tracked.keep_power(tensor, Power(parameters, degree, reads))

    def _find_misfits(self, call: Call, result: Tensor) -> None:
        """Report a constant that float16 does not have, else an overflow."""
        if call.name in _WITH_EPSILON:
            for value in _numbers_in(call.arguments):
                if 0 < abs(value) <= _EPSILON:
                    line = calling_line()
                    self._lost_epsilons.note(call, value, line, result)
                    self._emit(events.ConstantUsed(line, call.name, value))
                    return
        if all_finite(result):
            self._lost_epsilons.follow(call, result)
            return
        if call.name in _WITH_CONSTANT and self._find_constant(call):
            return
        inputs = [one for one in _tensors_in(call.arguments) if one.is_floating_point()]
        numbers = _numbers_in(call.arguments)
        if not inputs or not all(map(math.isfinite, numbers)):
            return
        if not all(map(all_finite, inputs)):
            self._note_input(call, inputs)
            return
        if _is_masking(call.name, inputs, numbers, result):
            self._has_mask = True
            return
        if is_called_by_funcamp():  # a step of funcamp scales and casts, and reports what overflows
            return
        lost = self._lost_epsilons.behind(call)
        if lost is not None:
            self._report_division(call, inputs, lost)
        elif not call.name.startswith(_NO_OVERFLOWS):
            self._report_overflow(call, inputs)

    def _report_overflow(self, call: Call, inputs: list[Tensor]) -> None:
        """Report an operation that makes inf or NaN of finite numbers."""
        make_proposal = functools.partial(propose, call, name_of_weight)
        self._emit(events.Overflowed(calling_line(), call.label, range_of(inputs), make_proposal=make_proposal))

    def _report_division(self, call: Call, inputs: list[Tensor], lost: LostEpsilon) -> None:
        """Report an operation that makes inf or NaN because an epsilon is zero."""
        make_proposal = functools.partial(propose_for_epsilon, call, lost.run, lost.epsilon)
        cause = f"the epsilon of {lost.epsilon:g} at {lost.line} is zero in float16"
        self._emit(events.Overflowed(calling_line(), call.label, range_of(inputs), cause, make_proposal=make_proposal))

    def _note_input(self, call: Call, inputs: list[Tensor]) -> None:
        """Remember the first operation that gets inf or NaN; -inf may be a mask."""
        if self.nonfinite_input or self._has_mask:  # a mask may make NaN further on
            return
        found = range_of(inputs)
        if not found.largest < math.inf:
            kind = "inf" if found.largest == math.inf else "NaN"
            self.nonfinite_input = f"{kind} is in an input of {call.label} at {calling_line()} already"

    def _find_constant(self, call: Call) -> bool:
        """Report a constant beyond float16, and return whether there is one."""
        for value in _numbers_in(call.arguments):
            if _LARGEST < abs(value) < math.inf:
                make_proposal = functools.partial(propose_for_constant, call, value)
                self._emit(events.ConstantUsed(calling_line(), call.name, value, make_proposal=make_proposal))
                return True
        return False


def all_finite(tensor: Tensor) -> bool:
    """Return whether a plain tensor is finite; True for any other."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return True
    if tensor.device.type == "meta" or not tensor.is_floating_point():
        return True
    with _without_modes(), torch.no_grad():
        return bool(torch.isfinite(tensor).all())


def _is_float16(args: Any, keywords: Any) -> bool:
    """Return whether the result of an operation that fills will be float16."""
    dtype = keywords.get("dtype")
    if dtype is None and args and isinstance(args[0], Tensor):
        dtype = args[0].dtype
    return bool(dtype == torch.float16)


def _is_mask(factor: Any) -> bool:
    """Return whether a factor of a gradient is one for each of its elements, which neither scales nor averages."""
    return isinstance(factor, Tensor) and factor.numel() > 1


def _is_masking(name: str, inputs: list[Tensor], numbers: list[float], result: Tensor) -> bool:
    """Return whether an operation casts or adds a mask, whose large negative numbers become -inf."""
    if name != "_to_copy" and name not in _SUMS:
        return False
    with _without_modes(), torch.no_grad():
        if (torch.isposinf(result) | torch.isnan(result)).any():
            return False
        if name == "_to_copy":
            return _is_mask_alone(inputs[0], torch.isneginf(result))
        smallest = min([*numbers, *[one.min().item() for one in inputs if one.numel()]])
    return smallest <= -_LARGEST


def _is_mask_alone(values: Tensor, overflows: Tensor) -> bool:
    """Return whether the values that overflow are one number, and it is very large or the others are one too."""
    masked, others = values[overflows], values[~overflows]
    is_one_number = bool((masked == masked[0]).all())
    return is_one_number and bool(masked[0] <= _SURELY_MASK or (others == others[:1]).all())


def _tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments and in lists of them."""
    tensors = []
    for one in args:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, (list, tuple)):
            tensors += [part for part in one if isinstance(part, Tensor)]
    return tensors


def _numbers_in(args: Iterable[Any]) -> list[float]:
    """Return the numbers among arguments, without flags."""
    return [float(one) for one in args if isinstance(one, (int, float)) and not isinstance(one, bool)]
