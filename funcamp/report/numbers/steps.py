"""The calls of this package's own steps, by name: the report imports none of them, and works without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from funcamp.numerics import taps
from funcamp.report.torch_names import tree_map, with_subclasses


class Call(NamedTuple):
    """A function that a recorder replaces."""

    owner: Any
    """The module or class that has it."""
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        function: Callable[..., Any] = getattr(self.owner, self.name)
        return function


#: The calls that count taps, which are no operations of a step.
TAPS = [Call(taps, name) for name in ("count", "count_both", "take_numbers")]


def scaling_calls() -> Iterator[tuple[Call, Callable[[Any], object]]]:
    """Yield the calls that scale a loss, with what returns the scale from a call's first argument; None without one."""
    for scaler_class in with_subclasses(torch.amp.GradScaler):
        if "scale" in vars(scaler_class):
            yield Call(scaler_class, "scale"), lambda scaler: scaler._scale if scaler.is_enabled() else None
    yield from [(call, lambda state: state.scale) for call in _found("funcamp._scaler.scale", "scaled")]


def step_calls() -> Iterator[tuple[Call, Callable[..., Any]]]:
    """Yield the calls of steps, each with what takes such a step eagerly."""
    for call in _found("funcamp._step.step", "TrainStep", "__call__"):
        yield call, call.function
    for call in _found("funcamp._jit.jit_step", "JitStep", "__call__"):
        yield call, _call_eagerly


def _found(module: str, *names: str) -> list[Call]:
    """Return a call of a module that the run has imported; none if it has not."""
    owner: Any = sys.modules.get(module)
    for name in names[:-1]:
        owner = getattr(owner, name, None)
    return [] if owner is None else [Call(owner, names[-1])]


def _call_eagerly(step: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the result of a `jit` step's call, computed eagerly."""
    unroll = step._options.unroll
    if unroll is None:
        return step._step(state, batch)  # type: ignore[no-any-return]
    metrics = []
    for number in range(unroll):
        state, step_metrics = step._step(state, tree_map(lambda leaf, number=number: leaf[number], batch))
        metrics.append(step_metrics)
    return state, tree_map(lambda *leaves: torch.stack(leaves), *metrics)
