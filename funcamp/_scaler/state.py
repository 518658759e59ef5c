"""The scaler's state: tensors only."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from funcamp import _tree


class ScalerState(NamedTuple):
    """What the scaler carries from one step to the next; immutable, a pytree of three tensors on one device.

    Under `torch.func.vmap` each field may carry leading batch dimensions: a batch of scalers.
    """

    scale: Tensor
    """float32, shape (): what the loss is multiplied by."""
    growth_tracker: Tensor
    """int32, shape (): clean steps since the scale last changed."""
    found_inf: Tensor
    """float32, shape (): 1.0 if a non-finite gradient was seen since the last update, else 0.0."""


class HysteresisState(NamedTuple):
    """A `ScalerState` with a count of the overflows that a rule still lets pass (Megatron, DeepSpeed, Paddle, apex)."""

    scale: Tensor
    """As in `ScalerState`."""
    growth_tracker: Tensor
    """As in `ScalerState`."""
    found_inf: Tensor
    """As in `ScalerState`."""
    hysteresis_tracker: Tensor
    """int32, shape (): overflows left, the one that backs off included; the library's own count."""


class ToleranceState(NamedTuple):
    """A `ScalerState` with fairseq's counts since the scale last changed."""

    scale: Tensor
    """As in `ScalerState`."""
    growth_tracker: Tensor
    """As in `ScalerState`."""
    found_inf: Tensor
    """As in `ScalerState`."""
    since_rescale: Tensor
    """int32, shape (): steps since the scale last changed, this one included."""
    overflows: Tensor
    """int32, shape (): those of them that overflowed."""


class WarmUpState(NamedTuple):
    """A `ScalerState` that is looking for its scale."""

    scale: Tensor
    """As in `ScalerState`."""
    growth_tracker: Tensor
    """As in `ScalerState`."""
    found_inf: Tensor
    """As in `ScalerState`."""
    stride: Tensor
    """int32, shape (): above 0 the next backoff's halvings, below 0 the doublings left, 0 once the scale is found."""


_DTYPES = {"scale": torch.float32, "growth_tracker": torch.int32, "found_inf": torch.float32}


def check_state(call: str, state: object) -> ScalerState:
    """Return the state if it is one: a NamedTuple whose first fields are ScalerState's, each of its dtype, shape ().

    Raises:
        TypeError: it is no scaler state, or a field is no tensor or of another dtype.
        ValueError: a field has a shape other than ().
    """
    if not isinstance(state, tuple) or getattr(type(state), "_fields", ())[:3] != ScalerState._fields:
        raise TypeError(f"{call}: state must be a ScalerState, as init makes it; got {_tree.brief(state)}")
    known = cast(ScalerState, state)
    for name, dtype in _DTYPES.items():
        value = getattr(known, name)
        if not isinstance(value, Tensor):
            raise TypeError(f"{call}: state.{name} must be a {dtype} tensor of shape (); got {value!r}")
        if value.dtype != dtype:
            raise TypeError(f"{call}: state.{name} must be {dtype}; got {value.dtype}")
        if value.dim() != 0:
            raise ValueError(
                f"{call}: state.{name} must have shape (); got {tuple(value.shape)} "
                "(a batch of scalers goes through torch.func.vmap)"
            )
    for name, value in zip(known._fields[3:], known[3:]):
        if not isinstance(value, Tensor) or value.dtype != torch.int32 or value.dim() != 0:
            raise TypeError(f"{call}: state.{name} must be an int32 tensor of shape (); got {value!r}")
    return known


def replace(state: ScalerState, **changes: Tensor) -> ScalerState:
    """A state with some fields changed, of the same type.

    `NamedTuple._replace` under torch.compile gives an empty tuple on torch 2.11; tests/test_upstream.py tells when this
    can go.
    """
    return type(state)(*[changes.get(name, value) for name, value in zip(state._fields, state)])
