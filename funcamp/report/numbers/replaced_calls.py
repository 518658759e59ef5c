"""The calls that a recording replaces: those that scale a loss, and the call of a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from funcamp import _tree
from funcamp._jit.jit_step import JitStep
from funcamp._scaler import scale as scaling
from funcamp._types import Tree
from funcamp._upstream.replaced import with_subclasses


class ScalingCall(NamedTuple):
    """A function that scales a loss."""

    owner: object
    """The module or class that has it."""
    name: str
    scale_after: Callable[[Any], object]
    """Returns the scale from the function's first argument, after the call; None if there is none."""


def _scale_of(scaler: torch.amp.GradScaler) -> object:
    """Return the scale of torch's scaler or a subclass; None if it is disabled, and so has none."""
    return scaler._scale if scaler.is_enabled() else None


def scaling_calls() -> Iterator[ScalingCall]:
    """Yield the functions that scale a loss: this library's, and those of torch's scaler and its subclasses."""
    yield ScalingCall(scaling, "scaled", lambda state: state.scale)
    for scaler_class in with_subclasses(torch.amp.GradScaler):
        if "scale" in vars(scaler_class):
            yield ScalingCall(scaler_class, "scale", _scale_of)


def call_eagerly(step: JitStep, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Return the result of a `jit` step's call, computed eagerly."""
    if step._options.unroll is None:
        return step._step(state, batch)
    all_metrics = []
    for step_batch in _tree.unstacked(batch, step._options.unroll):
        state, metrics = step._step(state, step_batch)
        all_metrics.append(metrics)
    return state, _tree.stacked(all_metrics)
