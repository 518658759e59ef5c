"""Delayed scaling: the state of all tensors in two, and the rule that moves it.

enters   = 0 < amax < inf, and the step is not skipped
history  <- amax, history[:-1]                      where it enters, the newest first
scale    <- f32(largest * 2^-margin / max(history)) where it enters, at most float32's largest number
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import integer
from funcamp._scaler.precision import reciprocal, widen
from funcamp.float8.config import BACKWARD, FORWARD, LARGEST, Float8Config, check_config

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Float8State(NamedTuple):
    """The state of delayed scaling between steps: immutable, a pytree of two tensors.

    A product has three tensors: input, weight and gradient of the output. Under `torch.func.vmap` both fields may have
    leading batch dimensions.
    """

    history: Tensor
    """float32, shape (length, products, 3): amaxes of earlier steps, the newest first; 0 if there is none yet."""
    scale: Tensor
    """float32, shape (products, 3): the scales of the next step."""


def init(config: Float8Config, products: int, *, device: torch.device | str | None = None) -> Float8State:
    """Make the state of delayed scaling before the first step.

    history = 0, scale = 1. Pure; no sync.

    Args:
        config: a configuration with delayed scaling.
        products: the number of products (layers), each with separate scales.
        device: the device of the tensors; None for torch's default device.

    Returns:
        A `Float8State`.

    Raises:
        TypeError: config is not a `Float8Config`, or products not an integer.
        ValueError: config has current scaling, which has no state; products is negative.

    Example:
        >>> from funcamp import float8
        >>> float8.init(float8.transformer_engine(amax_history_len=16), 2).history.shape
        torch.Size([16, 2, 3])
    """
    config = check_config("float8.init", config, "delayed")
    products = integer("float8.init", "products", products, 0)
    return Float8State(
        history=torch.zeros(config.history, products, 3, dtype=torch.float32, device=device),
        scale=torch.ones(products, 3, dtype=torch.float32, device=device),
    )


def update(state: Float8State, amax: Tensor, config: Float8Config, *, found_inf: Tensor | None = None) -> Float8State:
    """Enter the amaxes of a step into the history, and compute the scales of the next step.

    An amax enters if it is finite and above 0 and the step is not skipped; otherwise the history and the scale of its
    tensor stay as they are. So a layer that was not used keeps its scale, and one bad step leaves no trace:

        history  <- amax, history[:-1]
        scale    <- f32(largest * 2**-margin / amax of the history), at most float32's largest number

    The number of kernels does not depend on the number of products. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state that the step used.
        amax: float32, shape (products, 3): the gradient of the loss with respect to the amax of `scaled_mm`; the MAX
            over ranks and micro-batches.
        config: the configuration the state was made with.
        found_inf: the flag of the step, `ScalerState.found_inf`, shape (); None if the step is never skipped.

    Returns:
        The next state.

    Raises:
        TypeError: state, amax or config has another type or dtype.
        ValueError: the shapes differ, or config has current scaling or another history.

    Example:
        >>> from funcamp import float8
        >>> config = float8.transformer_engine(amax_history_len=2)
        >>> state = float8.update(float8.init(config, 1), torch.tensor([[2.0, 7.0, 0.0]]), config)
        >>> state.scale, state.history[:, 0, 0]
        (tensor([[224.,  64.,   1.]]), tensor([2., 0.]))

    References:
        transformer_engine/common/recipe/delayed_scaling.cu, NVIDIA/TransformerEngine at d0067d0.
    """
    call = "float8.update"
    config = check_config(call, config, "delayed")
    history, scale = check_state(call, state, config)
    check_tensor(call, "amax", amax, scale.shape)
    enters = torch.isfinite(amax) & (amax > 0)
    if found_inf is not None:
        if not isinstance(found_inf, Tensor) or found_inf.dim():
            raise TypeError(f"{call}: found_inf must be a tensor of shape () or None; got {_tree.brief(found_inf)}")
        enters = enters & (found_inf == 0)
    next_history = torch.cat([amax[None], history[:-1]])
    amax_of_history = next_history.amax(0) if config.amax == "max" else amax
    largest = torch.where(_is_gradient(scale), LARGEST[BACKWARD], LARGEST[FORWARD]) * 2.0**-config.margin
    next_scale = (widen(largest) / widen(amax_of_history)).float().clamp(max=_FLOAT32_MAX)
    return Float8State(
        history=torch.where(enters, next_history, history),
        scale=torch.where(enters, next_scale, scale),
    )


def with_loss_scale(scale: Tensor, loss_scale: Tensor) -> Tensor:
    """Return the scales for the gradients of a loss that is multiplied by a loss scale."""
    divided = (scale * reciprocal(loss_scale)).clamp(max=_FLOAT32_MAX)
    return torch.where(_is_gradient(scale), divided, scale)


def without_loss_scale(amax: Tensor, loss_scale: Tensor) -> Tensor:
    """Return the amaxes for the gradients of the loss itself."""
    return torch.where(_is_gradient(amax), amax * reciprocal(loss_scale), amax)


def _is_gradient(values: Tensor) -> Tensor:
    """Return which of a product's three tensors is the gradient, the last; bool, shape (3,)."""
    return torch.arange(3, device=values.device) == 2  # torch.tensor([...]) would copy from the host


def check_state(call: str, state: object, config: Float8Config) -> Float8State:
    """Return the state if it is one of this configuration.

    Raises:
        TypeError: it is something else, or a field has another dtype.
        ValueError: a field has another shape.
    """
    if not isinstance(state, Float8State):
        raise TypeError(f"{call}: state must be a Float8State, as float8.init makes it; got {_tree.brief(state)}")
    products = state.scale.shape[0] if isinstance(state.scale, Tensor) and state.scale.dim() else 0
    check_tensor(call, "state.scale", state.scale, (products, 3))
    check_tensor(call, "state.history", state.history, (config.history, products, 3))
    return state


def check_tensor(call: str, name: str, value: object, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError if this is not a float32 tensor of a shape."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        raise TypeError(f"{call}: {name} must be a float32 tensor of shape {tuple(shape)}; got {_tree.brief(value)}")
    if value.shape != shape:
        raise ValueError(f"{call}: {name} must have shape {tuple(shape)}; got {tuple(value.shape)}")
