"""The scaler's state: tensors only. Factors and reciprocals of a scale are rounded once, from float64 to float32."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcamp import _tree


class ScalerState(NamedTuple):
    """The scaler's state between steps: immutable, a pytree of three tensors on one device.

    Under `torch.func.vmap` each field may have leading batch dimensions: a batch of scalers.
    """

    scale: Tensor
    """float32, shape (): the factor that multiplies the loss."""
    growth_tracker: Tensor
    """int32, shape (): clean steps since the scale last changed."""
    found_inf: Tensor
    """float32, shape (): 1.0 if a non-finite gradient was seen since the last update, else 0.0."""


class RuleState(NamedTuple):
    """A `ScalerState` of a rule with further counters: overflows left, doublings left."""

    scale: Tensor
    """As in `ScalerState`."""
    growth_tracker: Tensor
    """As in `ScalerState`."""
    found_inf: Tensor
    """As in `ScalerState`."""
    counters: dict[str, Tensor]
    """int32, shape () each, by name: those of `Rule.first_counters`."""


_DTYPES = {"scale": torch.float32, "growth_tracker": torch.int32, "found_inf": torch.float32}


def check_state(call: str, state: object) -> ScalerState:
    """Return the state if its first fields are ScalerState's, each with the right dtype and shape ().

    Raises:
        TypeError: state is not a scaler state, or a field is not a tensor or has another dtype.
        ValueError: a field has a shape other than ().
    """
    # By the fields, because a `RuleState` has one more than a `ScalerState`.
    if not isinstance(state, tuple) or getattr(type(state), "_fields", ())[:3] != ScalerState._fields:
        raise TypeError(f"{call}: state must be a ScalerState, as init makes it; got {_tree.brief(state)}")
    scaler_state = cast(ScalerState, state)
    tensors = dict(zip(ScalerState._fields, scaler_state)) | counters_of(scaler_state)
    for name, value in tensors.items():
        dtype = _DTYPES.get(name, torch.int32)
        if not isinstance(value, Tensor) or value.dtype != dtype:
            raise TypeError(f"{call}: state.{name} must be a {dtype} tensor; got {_tree.describe(value)}")
        if value.dim() != 0:
            raise ValueError(
                f"{call}: state.{name} must have shape (); got {tuple(value.shape)} "
                "(a batch of scalers goes through torch.func.vmap)"
            )
    return scaler_state


def replace(state: ScalerState, **changes: Any) -> ScalerState:
    """Return a state of the same type with some fields changed.

    `NamedTuple._replace` under torch.compile returns an empty tuple on torch 2.11, so all fields are named.
    """
    return type(state)(*[changes.get(name, value) for name, value in zip(state._fields, state)])


def counters_of(state: ScalerState) -> dict[str, Tensor]:
    """Return the counters of the state's rule besides growth_tracker; empty for torch's rule."""
    counters: dict[str, Tensor] = getattr(state, "counters", {})
    return counters


def with_counters(state: ScalerState, counters: dict[str, Tensor]) -> ScalerState:
    """Return the state with these counters, or as it is if there are none."""
    return cast(ScalerState, RuleState(*state, counters)) if counters else state


def tensors_of(counts: dict[str, int], device: torch.device | str | None) -> dict[str, Tensor]:
    """Return counters as tensors for a state."""
    return {name: torch.full((), count, dtype=torch.int32, device=device) for name, count in counts.items()}


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, the dtype of Python's numbers; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of Python's numbers, for factors, reciprocals and sums."""
    return tensor.to(wide_dtype(tensor.device))


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, float32."""
    # On some devices and compilers float32 division is approximate; float64 division is exact after rounding.
    return widen(scale).reciprocal().float()
