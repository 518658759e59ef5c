"""Operations on gradients and on scaled losses: what a loop writes into gradients, clips, sums, reads and computes."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from funcamp.report import events
from funcamp.report.addends import Addends, has_small_factors
from funcamp.report.events import Event, Key
from funcamp.report.lines import calling_line
from funcamp.report.overflow_masks import OverflowMasks
from funcamp.report.powers import (
    BOUNDS,
    COMPARISONS,
    DECISIONS,
    HOST_READS,
    Power,
    combined,
    degree_of,
    degree_of_product,
    depends_on_scale,
    divides_by_scale,
)
from funcamp.report.reruns import Call
from funcamp.report.tensors import tensor_arguments
from funcamp.report.tracked import Tracked
from funcamp._types import Args

#: Statistics. A check for inf and NaN is none: its `abs` is only compared for equality.
_READS = {"norm", "linalg_vector_norm", "sum", "mean", "max", "amax", "min", "std", "var", "pow"}
_READS |= {"_local_scalar_dense", "square", "dot", "histc"}
_COPIES = {"copy_", "_foreach_copy_"}
#: Writes that are no unscaling if the factor is a tensor of the gradient's shape.
_PRODUCTS = {"mul_", "div_"}
_WRITES = {*_PRODUCTS, "_foreach_mul_", "_foreach_div_", *_COPIES, "_amp_foreach_non_finite_check_and_unscale_"}
_CLIPS = {"clamp", "clamp_min", "clamp_max", "clamp_", "clamp_min_", "clamp_max_"}
_CLIPS |= {"_foreach_clamp_min_", "_foreach_clamp_max_"}
_SUMS = {"add", "sub"}
_ZEROS = {"zero_", "_foreach_zero_"}
_CHANGES = _WRITES | _CLIPS | _ZEROS

#: Operations that read a loss on the host, or divide it.
_LOSS_READS = {"_local_scalar_dense", "div", "mul"}


class _Outcome(enum.Enum):
    """What an operation makes of gradients, or of what is computed from them."""

    USED = enum.auto()
    """A number that grows with the scale is read on the host, or decides."""
    FREE = enum.auto()
    """A number that does not grow with the scale, or may not."""
    GRADIENTS = enum.auto()
    """Gradients again, such as those without their mean."""
    NUMBER = enum.auto()
    """A number that grows with the scale."""


class _Computation(NamedTuple):
    """An operation on gradients, or on what is computed from them."""

    name: str
    """The operation, without what marks it as in place or for a list."""
    known_powers: list[Power]
    """Of the arguments that are computed from gradients."""
    degree: float | None
    """Of the result; None if it is unknown."""
    has_other_tensors: bool
    """Whether an argument is a tensor of which nothing is known."""
    is_decision: bool
    """Whether it compares or bounds, and its result changes with the scale."""

    @classmethod
    def of(cls, name: str, args: Args, tracked: Tracked) -> _Computation | None:
        """Return what is known about an operation; None if no argument is computed from gradients."""
        powers = [tracked.power_of(argument) for argument in args]
        if any(power is not None and power.degree for power in powers):
            powers = [power if power is not None and power.degree else None for power in powers]
        known_powers = [power for power in powers if power is not None]
        if not known_powers:
            return None
        degree = degree_of(name, args, powers, tracked.scales)
        is_decision = name in DECISIONS and depends_on_scale(args, powers, tracked.scales)
        unknown = [argument for argument, power in zip(args, powers) if power is None]
        lists = [part for argument in args if isinstance(argument, (list, tuple)) for part in argument]
        unknown += [part for part in lists if tracked.power_of(part) is None]
        return cls(name, known_powers, degree, bool(tensor_arguments(unknown)), is_decision)

    @property
    def power(self) -> Power:
        """The power of the result."""
        power = combined(self.known_powers, self.degree or 0.0)
        return power._replace(is_certain=power.is_certain and not self.has_other_tensors)

    @property
    def is_free_of_scale(self) -> bool:
        """Whether the result is certainly free of the scale, as a gradient of length 1."""
        is_number = self.name not in COMPARISONS and self.name not in HOST_READS
        return self.degree == 0 and is_number and self.power.is_certain

    @property
    def outcome(self) -> _Outcome:
        """What the result is."""
        if self.is_decision or (self.name in HOST_READS and self.degree):
            return _Outcome.USED
        if not self.degree or self.name in COMPARISONS:
            return _Outcome.FREE
        are_all_read = all(power.read_ids for power in self.known_powers)
        is_gradients = self.degree == 1 and self.name not in _READS and not are_all_read
        return _Outcome.GRADIENTS if is_gradients else _Outcome.NUMBER


class GradientOperations:
    """Reports operations on gradients, on what is computed from them, and on scaled losses.

    Args:
        emit: gets each event.
        tracked: which tensors are gradients or scaled losses.
    """

    def __init__(self, emit: Callable[[Event], None], tracked: Tracked) -> None:
        self._emit = emit
        self._tracked = tracked
        self._addends = Addends(tracked)
        self._masks = OverflowMasks(tracked)
        self._read_ids = itertools.count()

    def check(self, name: str, call: Call, result: object) -> None:
        """Report an operation that has run. The name is that of the call."""
        args = call.arguments
        if name in _LOSS_READS:
            self._report_loss_read(name, args[0])
        plain_name = name.removesuffix("_").removeprefix("_foreach_")
        self._addends.follow(plain_name, call, result)
        if plain_name in _SUMS:
            self._report_addition(call)
        self._masks.follow(name, call, result)
        if self._masks.is_replacement(name, call):
            self._report_replacement(args, tensor_arguments((result,)))
            return
        is_change = name in _CHANGES and self._report_change(name, args)
        if not is_change:
            self._follow(plain_name, args, result)

    def _report_addition(self, call: Call) -> None:
        """Report that what is not times the scale is added to gradients."""
        if not has_small_factors(call) or not self._addends.among(call.arguments):
            return
        power = self._tracked.power_of(call.arguments[0])
        if power is not None and power.degree == 1 and not power.read_ids:
            self._emit(events.AddedToGradients(calling_line(), power.parameters))

    def _report_replacement(self, args: Args, results: list[Tensor]) -> None:
        """Report that inf and NaN in gradients are replaced, now or when the loop makes a result the gradient."""
        powers = [power for power in map(self._tracked.power_of, args) if power is not None]
        keys = self._tracked.gradients_among(results)
        if keys:
            self._emit(events.NonfiniteReplaced(calling_line(), keys))
            return
        for tensor in results:
            self._tracked.remember_power(tensor, combined(powers, 1.0)._replace(finite_line=calling_line()))

    def _report_loss_read(self, name: str, tensor: object) -> None:
        """Report a scaled loss that is read or divided."""
        scaling = self._tracked.scaling_of(tensor)
        if scaling is not None:
            is_on_host = name == "_local_scalar_dense"
            self._emit(events.ScaledLossRead(calling_line(), scaling.scaler, scaling.updates, is_on_host))

    def _report_change(self, name: str, args: Args) -> bool:
        """Report an operation that writes, clips or clears gradients, and return whether it does."""
        tensors = tensor_arguments(args)
        writes_first = name.endswith("_") and not name.startswith("_")  # `_foreach_mul_` writes a list of tensors
        keys = self._tracked.gradients_among(tensors[:1] if writes_first else tensors)
        if not keys:
            return False
        if name in _CLIPS:
            self._emit(events.Clipped(calling_line(), keys, is_by_value=True))
        elif name in _ZEROS:
            self._emit(events.Cleared(calling_line(), keys, None))
        else:
            degree = self._report_write(name, args, keys)
            if degree is None:
                self._tracked.forget_gradients(tensors[:1] if writes_first else tensors)
        return True

    def _report_write(self, name: str, args: Args, keys: tuple[Key, ...]) -> float | None:
        """Report that gradients were multiplied, divided or written over, and return their degree now."""
        powers = [self._tracked.power_of(argument) for argument in args[:2]]
        other = powers[1] if len(powers) > 1 else None
        if name in _COPIES:
            self.report_new_gradients(keys, other, tensor_arguments(args[1:2]))
            return None if other is None else other.degree
        if powers[0] is None or other is None:
            degree = 1.0 if name in _PRODUCTS and _is_mask(args[1]) else None
            is_divided = divides_by_scale(name, args, self._tracked.scales)
            self._emit(events.GradientWritten(calling_line(), keys, degree, divides_by_scale=is_divided))
            return degree
        self._emit(events.ReadsCancelled(calling_line(), other.read_ids))
        degree = degree_of_product(name, args, powers, self._tracked.scales)
        if degree == 0 and not other.is_certain:
            degree = None
        self._emit(events.GradientWritten(calling_line(), keys, degree, other.read_ids))
        return degree

    def report_new_gradients(self, keys: tuple[Key, ...], power: Power | None, tensors: list[Tensor]) -> None:
        """Report that gradients were replaced.

        Args:
            keys: the parameters.
            power: that of the new gradients; None if they are not computed from gradients.
            tensors: the new gradients.
        """
        reduced_line = self._tracked.where_reduced(tensors) or (None if power is None else power.reduced_line)
        if reduced_line is not None:
            self._emit(events.Reduced(reduced_line, keys))
        if power is not None:
            self._emit(events.ReadsCancelled(calling_line(), power.read_ids))
            if power.finite_line is not None:
                self._emit(events.NonfiniteReplaced(power.finite_line, keys))
        line = calling_line() if power is None or power.free_line is None else power.free_line
        self._emit(events.GradientWritten(line, keys, None if power is None else power.degree))

    def _follow(self, name: str, args: Args, result: object) -> None:
        """Report a norm or another statistic of gradients, and what is computed from it."""
        computation = _Computation.of(name, args, self._tracked)
        if computation is None:
            return
        power = self._report_reading(computation)
        outcome = computation.outcome
        if outcome is _Outcome.USED:
            self._emit(events.ReadsUsed(calling_line(), power.read_ids))
        elif outcome is not _Outcome.NUMBER:
            self._emit(events.ReadsCancelled(calling_line(), power.read_ids))
        results = tensor_arguments((result,))
        if outcome is _Outcome.USED or (outcome is _Outcome.FREE and not computation.is_free_of_scale):
            self._tracked.forget_powers(results)
            return
        if outcome is not _Outcome.NUMBER:
            power = power._replace(read_ids=())
        if outcome is _Outcome.FREE:
            power = power._replace(free_line=power.free_line or calling_line())
        for tensor in results:
            if not (tensor.is_leaf and tensor.requires_grad):  # a step by hand, which changes parameters
                self._tracked.remember_power(tensor, power)

    def _report_reading(self, computation: _Computation) -> Power:
        """Report gradients that are bounded or read for the first time, and return the power of the result."""
        power = computation.power
        if power.read_ids:
            return power
        if computation.is_decision and computation.name in BOUNDS:
            self._emit(events.Clipped(calling_line(), power.parameters, is_by_value=True))
        elif computation.is_decision or computation.name in _READS:
            power = self._report_read(power)
        return power

    def report_host_read(self, tensor: Tensor) -> None:
        """Report that a tensor is read on the host for a statistic, if it grows with the scale."""
        power = self._tracked.power_of(tensor)
        if power is not None and power.degree:
            if not power.read_ids:
                power = self._report_read(power)
            self._emit(events.ReadsUsed(calling_line(), power.read_ids))

    def report_norm(self, norm: object, parameters: tuple[Key, ...]) -> None:
        """Report the norm of gradients that a function of torch has computed."""
        power = self._report_read(Power(parameters))
        for tensor in tensor_arguments((norm,)):
            self._tracked.remember_power(tensor, power)

    def _report_read(self, power: Power) -> Power:
        """Report that gradients are read, and return their power with the read."""
        read_id = next(self._read_ids)
        self._emit(events.GradientRead(calling_line(), power.parameters, read_id))
        return power._replace(read_ids=(read_id,))


def _is_mask(factor: object) -> bool:
    """Return whether a gradient's factor has a number for each element, which neither scales nor averages."""
    return isinstance(factor, Tensor) and factor.numel() > 1
