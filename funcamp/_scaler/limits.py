"""A scale that should fall or grow and cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._scaler.config import ScalerConfig, check_state_and_config
from funcamp._scaler.next_scale import bounded
from funcamp._scaler.state import ScalerState


def exhausted(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Return whether a gradient is non-finite and the rule would lower the scale but cannot.

    exhausted = the rule backs off, and the scale after its bounds is not lower, or is 0. Then the loss overflows at any
    scale: the model diverged, or it needs another precision. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is not a `ScalerConfig`, or state is not a state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=1.0, min_scale=1.0)
        >>> _, state = unscale_and_check(init(config), torch.tensor(float("inf")))
        >>> exhausted(state, config)
        tensor(True)

    References:
        DeepSpeed and fairseq raise here: deepspeed/runtime/fp16/loss_scaler.py, fairseq/optim/dynamic_loss_scaler.py.
    """
    state, config = check_state_and_config("exhausted", state, config)
    outcome = config.rule.outcome(state, config)
    next_scale = bounded(outcome.scale, config)
    return outcome.backs_off & (~(next_scale < state.scale) | (next_scale == 0))


def saturated(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Return whether the scale is due to grow but cannot.

    saturated = the rule grows, and the scale after its bounds is not higher, or is infinite. Then gradients do not
    overflow even at the largest scale. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is not a `ScalerConfig`, or state is not a state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=8.0, max_scale=8.0, growth_interval=1)
        >>> saturated(init(config), config)
        tensor(True)

    References:
        `_amp_update_scale_` keeps a scale that would be infinite: native/cuda/AmpKernels.cu, PyTorch 2.13.
    """
    state, config = check_state_and_config("saturated", state, config)
    outcome = config.rule.outcome(state, config)
    next_scale = bounded(outcome.scale, config)
    return outcome.grows & (~(next_scale > state.scale) | torch.isinf(next_scale))
