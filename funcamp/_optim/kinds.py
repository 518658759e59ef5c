"""Trials of a class with kinds of parameters that its first trial does not have: of another dtype, of another shape.

The first trial has small parameters of a few shapes, in float64. A class may do otherwise for bfloat16 (sum by Kahan,
round stochastically), for complex numbers, for matrices that are square or large, for tensors of three dimensions. So
when a state is made, it is tried in each new dtype, and with each shape of another number of dimensions, that is
square, or for which its step calls other functions of torch than for those that were tried. That is found out on
tensors without values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from funcamp._optim.arguments import first_line, impure, is_own_refusal, is_torchs
from funcamp._optim.dataflow import OperationCall
from funcamp._optim.independence import flows_on, independence_of
from funcamp._optim.long_trial import (
    WHY_OTHER_NUMBERS,
    Counts,
    LoopStep,
    LoopTrial,
    follows,
    follows_joined,
    loop_steps,
)
from funcamp._optim.modes import generators_put_back, without_modes
from funcamp._optim.python_names import names_for_numbers
from funcamp._optim.record import numbers_like
from funcamp._trace.as_compiled import as_eager

if TYPE_CHECKING:
    from funcamp._optim.class_step import ClassStep
    from funcamp._optim.traits import Traits

#: A parameter of a new shape is made smaller as long as the class does the same, but not below this.
_FEW_ELEMENTS = 64
#: One with which the class fails without values is not made smaller, and a loop with more elements would take long.
_MANY_ELEMENTS = 1 << 20
#: Parameters of the first trial that are beside one of a new shape.
_OTHERS = 2


class Kind(NamedTuple):
    """The shape and dtype of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Code(NamedTuple):
    """What distinguishes kinds of parameters with which a class may do something else."""

    functions: tuple[object, ...]
    """Those of torch that a step calls on each way through it."""
    has_nan: bool
    """Whether it gives one of them NaN: what C takes out of a `Number`."""
    dimension_count: int
    is_square: bool


class _Operations(NamedTuple):
    """What a step does with one parameter of a kind."""

    calls: list[OperationCall] | None
    """The operations; None if one mixes elements or draws random numbers."""
    code: _Code | None
    """None if it fails on such a parameter without values."""


@dataclass
class Kinds:
    """The kinds of parameters with which a class was tried, and what it does with each."""

    _pointwise: dict[torch.dtype, bool] = field(default_factory=dict)
    _tried_code: dict[torch.dtype, set[_Code | None]] = field(default_factory=dict)
    _operations: dict[Kind, _Operations] = field(default_factory=dict)

    def calls(self, traits: Traits, kind: Kind) -> list[OperationCall] | None:
        """Return the operations of a step on such a parameter; None if one mixes elements or draws random numbers."""
        return self._operations_on(traits, kind).calls

    def is_pointwise_in(self, traits: Traits, dtype: torch.dtype) -> bool:
        """Return `Traits.pointwise` for parameters of a dtype, in which the class is tried at the first call.

        Raises:
            TypeError: its steps as a function come to other numbers than its own loop.
        """
        if dtype not in self._pointwise:
            with without_modes(), as_eager(), generators_put_back():
                self._pointwise[dtype] = _is_pointwise_in(traits, dtype)
        return self._pointwise[dtype]

    def try_all(self, traits: Traits, params: Iterable[Tensor]) -> None:
        """Try a class with the kinds of some parameters that are new.

        Raises:
            TypeError: its steps as a function come to other numbers than its own loop.
        """
        trial = traits.loop_trial
        if trial is None or is_torchs(traits.step.cls):  # torch's classes do the same for every kind
            return
        for kind in dict.fromkeys(Kind(tuple(param.shape), param.dtype) for param in params):
            self.is_pointwise_in(traits, kind.dtype)
            if kind.dtype not in self._tried_code:
                kinds = [Kind(tuple(param.shape), kind.dtype) for param in trial.params]
                self._tried_code[kind.dtype] = {self._operations_on(traits, one).code for one in kinds}
            tried = self._tried_code[kind.dtype]
            code = self._operations_on(traits, kind).code
            is_too_large = code is None and torch.Size(kind.shape).numel() > _MANY_ELEMENTS
            if code not in tried and not is_too_large:
                with without_modes(), as_eager(), generators_put_back():
                    _try_shape(traits, trial, _smallest(traits.step, kind, code))
                tried.add(code)

    def _operations_on(self, traits: Traits, kind: Kind) -> _Operations:
        if kind not in self._operations:
            self._operations[kind] = _operations_of(traits.step, kind)
        return self._operations[kind]


def _operations_of(step: ClassStep, kind: Kind) -> _Operations:
    flows = flows_on(step, [kind.shape], kind.dtype)
    if flows is None:
        return _Operations(None, None)
    calls = [call for flow in flows for call in flow.operations]
    is_square = len(kind.shape) > 1 and len({*kind.shape}) == 1
    has_nan = any(flow.has_nan for flow in flows)
    code = _Code(tuple(call[0] for call in calls), has_nan, len(kind.shape), is_square)
    is_elementwise = all(flow.is_pointwise and not flow.draws for flow in flows)
    return _Operations(calls if is_elementwise else None, code)


def _smallest(step: ClassStep, kind: Kind, code: _Code | None) -> Kind:
    """Return a kind with the smallest shape that is found with which the class does the same."""
    while code is not None and torch.Size(kind.shape).numel() > _FEW_ELEMENTS:
        smaller_kinds = (kind._replace(shape=shape) for shape in _halves(kind.shape))
        found = next((smaller for smaller in smaller_kinds if _operations_of(step, smaller).code == code), None)
        if found is None:
            break
        kind = found
    return kind


def _halves(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield smaller shapes: of half the size in all dimensions, then in one."""

    def half(size: int) -> int:
        return max(size // 2, min(size, 2))

    halves = [tuple(map(half, shape))]
    halves += [(*shape[:index], half(size), *shape[index + 1 :]) for index, size in enumerate(shape)]
    yield from (one for one in halves if one != shape)


def _is_pointwise_in(traits: Traits, dtype: torch.dtype) -> bool:
    """Return `Traits.pointwise` for parameters of a dtype, after a long loop in this dtype."""
    step, first_trial = traits.step, traits.loop_trial
    if first_trial is None or dtype == first_trial.params[0].dtype or is_torchs(step.cls):
        return traits.pointwise
    trial = first_trial._replace(params=_in_dtype(first_trial.params, dtype))
    steps = _followed_steps(traits, trial, f"in {dtype}")
    if not steps:
        return traits.pointwise  # the class takes no parameters of this dtype, and says so in its first step
    is_pointwise = independence_of(step, trial.params).is_pointwise
    return traits.pointwise and is_pointwise and follows_joined(traits, trial, steps)


def _try_shape(traits: Traits, first_trial: LoopTrial, kind: Kind) -> None:
    """Try a class with a parameter of a new shape, beside some of its first trial."""
    new_param = numbers_like(kind.shape, torch.float64, offset=len(first_trial.params))
    params = _in_dtype([*first_trial.params[:_OTHERS], new_param], kind.dtype)
    counts = Counts([*first_trial.counts.per_param[:_OTHERS], {}], first_trial.counts.shared)
    trial = first_trial._replace(params=params, counts=counts)
    if _followed_steps(traits, trial, f"for a parameter of shape {kind.shape} in {kind.dtype}"):
        independence_of(traits.step, params[-1:])  # refuses a class that draws and branches


def _in_dtype(params: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if dtype.is_complex:
        return [torch.complex(param, param.cos()).to(dtype) for param in params]
    return [param.to(dtype) for param in params]


def _followed_steps(traits: Traits, trial: LoopTrial, where: str) -> list[LoopStep]:
    """Return the steps of a loop that the class as a function follows; none if the class takes no such parameters.

    Raises:
        TypeError: it comes to other numbers.
    """
    step = traits.step
    if trial.params[0].dtype.itemsize == 2:
        trial = trial._replace(thresholds=[])  # in many steps differences of roundings grow
    with names_for_numbers(step.cls, None):  # so that nothing is compiled again for another kind
        steps = loop_steps(step, trial, step.dynamic)
    if not steps:
        return []

    def is_followed() -> bool:
        try:
            return follows(step, trial.params, steps, trial.counts, starts_at_zero=traits.starts_at_zero)
        except Exception as error:
            if is_own_refusal(error):
                raise
            reason = f"{where} its steps as a function fail ({type(error).__name__}: {first_line(error)})"
            raise impure(step.cls, reason) from error

    # A first step with other operations than in the trial may nevertheless be as a later one.
    new_operations = {step.form([param]).operations for param in trial.params} - step.known_first_operations
    step.known_first_operations.update(new_operations)
    if not is_followed():
        step.known_first_operations.difference_update(new_operations)
        if not new_operations or not is_followed():
            raise impure(step.cls, f"{where} {WHY_OTHER_NUMBERS}")
    return steps
