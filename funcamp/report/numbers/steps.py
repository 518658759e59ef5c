"""The calls of this package's own steps, by name: the report imports none of them, and works without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from funcamp.report.torch_names import with_subclasses


def scaling_calls() -> Iterator[tuple[Any, str, Callable[[Any], object]]]:
    """Yield the functions that scale a loss: owner, name, and what returns the scale from a call's first argument."""
    for scaler_class in with_subclasses(torch.amp.GradScaler):
        if "scale" in vars(scaler_class):
            yield scaler_class, "scale", lambda scaler: scaler._scale if scaler.is_enabled() else None
    scale = sys.modules.get("funcamp._scaler.scale")
    if scale is not None:
        yield scale, "scaled_leaves", lambda state: state.scale


def step_calls() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the calls of steps: owner, name, and what takes such a step eagerly."""
    module: Any = sys.modules.get("funcamp._step.step")
    if module is not None:
        yield module.TrainStep, "__call__", module.TrainStep.__call__
    module = sys.modules.get("funcamp._jit.jit_step")
    if module is not None:
        yield module.JitStep, "__call__", _call_eagerly


def _call_eagerly(step: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the result of a `jit` step's call, computed eagerly."""
    if step._options.unroll is not None:
        raise ValueError(f"report: a step must take one batch at a time; got unroll={step._options.unroll}")
    return step._step(state, batch)  # type: ignore[no-any-return]
