"""Whether a scale is at the end of its range: what other libraries raise for, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.rule_table import bounded, check_suits, outcome
from funcamp._scaler.state import ScalerState, check_state


def exhausted(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Tell whether a gradient is not finite and the rule would lower the scale, but cannot.

    exhausted = the rule backs off, and the scale after its bounds is not lower, or is 0. The loss overflows whatever
    the scale: the model diverged, or its numbers need another precision. Pure; safe under torch.compile and vmap; no
    sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is no `ScalerConfig`, or state is no state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=1.0, min_scale=1.0)
        >>> _, state = unscale_and_check(init(config), torch.tensor(float("inf")))
        >>> exhausted(state, config)
        tensor(True)

    References:
        DeepSpeed and fairseq raise there: deepspeed/runtime/fp16/loss_scaler.py, fairseq/optim/dynamic_loss_scaler.py.
    """
    state, config = _checked("exhausted", state, config)
    after = outcome(state, config)
    scale = bounded(after.state, config).scale
    return after.backs_off & (~(scale < state.scale) | (scale == 0))


def saturated(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Tell whether the scale is due to grow, but cannot.

    saturated = the rule grows, and the scale after its bounds is not higher, or is infinite. Gradients are small enough
    to do without scaling. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is no `ScalerConfig`, or state is no state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=8.0, max_scale=8.0, growth_interval=1)
        >>> saturated(init(config), config)
        tensor(True)

    References:
        `_amp_update_scale_` keeps a scale that would be infinite: native/cuda/AmpKernels.cu, PyTorch 2.13.
    """
    state, config = _checked("saturated", state, config)
    after = outcome(state, config)
    scale = bounded(after.state, config).scale
    return after.grows & (~(scale > state.scale) | torch.isinf(scale))


def _checked(call: str, state: ScalerState, config: ScalerConfig) -> tuple[ScalerState, ScalerConfig]:
    state, config = check_state(call, state), check_config(call, config)
    check_suits(call, state, config)
    return state, config
