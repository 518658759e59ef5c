"""The update of the scale after a step."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import real
from funcamp._scaler.config import ScalerConfig, check_state_and_config
from funcamp._scaler.next_scale import bounded
from funcamp._scaler.state import ScalerState, replace


def update(
    state: ScalerState, config: ScalerConfig = ScalerConfig(), *, new_scale: float | Tensor | None = None
) -> ScalerState:
    """Move the scale by the configuration's rule and clear `found_inf`.

    The default rule is torch's, bit for bit. Factors are applied in float64 and rounded once to float32. Any nonzero
    flag, also NaN, counts as found. The scale does not grow to infinity:

        found_inf > 0:   scale <- f32(f64(scale) * backoff_factor);  growth_tracker <- 0
        otherwise:       growth_tracker <- growth_tracker + 1
                         if growth_tracker == growth_interval:
                             grown <- f32(f64(scale) * growth_factor)
                             scale <- grown if grown is finite else scale;  growth_tracker <- 0
        then, if set:    clamp scale to [min_scale, max_scale]

    Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`.
        config: the configuration the state was made with.
        new_scale: sets the scale instead of the rule and keeps the tracker, as in torch; a positive Python number, or a
            float32 tensor of one element, which is copied and whose value is not checked. The bounds still apply.

    Returns:
        The next state, with `found_inf` 0.

    Raises:
        TypeError: config is not a `ScalerConfig`; new_scale is neither a number nor a float32 tensor.
        ValueError: new_scale is a number that is not positive and finite, or a tensor that has several elements,
            requires grad, or is on another type of device.

    Example:
        >>> config = ScalerConfig(init_scale=8.0)
        >>> _, state = unscale_and_check(init(config), torch.tensor(float("nan")))
        >>> update(state, config).scale
        tensor(4.)

    References:
        `_amp_update_scale_`, aten/src/ATen/native/cuda/AmpKernels.cu, and `GradScaler.update`,
        torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    state, config = check_state_and_config("update", state, config)
    found_inf = torch.zeros_like(state.found_inf)
    if new_scale is not None:
        scale = bounded(_new_scale(state, new_scale), config)
        return replace(state, scale=scale, found_inf=found_inf)
    outcome = config.rule.outcome(state, config)
    return replace(
        state,
        scale=bounded(outcome.scale, config),
        growth_tracker=outcome.growth_tracker,
        found_inf=found_inf,
        counters=outcome.counters,  # ignored by a state without
    )


def _new_scale(state: ScalerState, value: object) -> Tensor:
    """Return the scale that the caller of `update` sets, checked."""
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise TypeError(f"update: new_scale must be a float32 tensor or a number; got {value.dtype}")
        if value.numel() != 1 or value.requires_grad or value.device.type != state.scale.device.type:
            raise ValueError(
                "update: new_scale must have one element, not require grad, and lie on the state's type of device; "
                f"got {_tree.describe(value)}, requires_grad={value.requires_grad}"
            )
        return value.reshape(()).to(state.scale.device, non_blocking=True, copy=True)
    number = real("update", "new_scale", value, "a float32 tensor or a number")
    if not 0.0 < number <= torch.finfo(torch.float32).max:
        raise ValueError(f"update: new_scale must be positive and finite in float32; got {value}")
    return torch.full_like(state.scale, number)
