"""The state before the first step."""

from __future__ import annotations

import torch

from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.state import ScalerState, tensors_of, with_counters


def init(config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None) -> ScalerState:
    """Make the state before the first step.

    scale = init_scale, growth_tracker = 0, found_inf = 0. All tensors are created at once. Pure; no sync.

    Args:
        config: the configuration; pass the same one to `update`.
        device: the state's device, that of the gradients. None for torch's default device.

    Returns:
        A `ScalerState`; if the rule counts more, a state with a dict of `counters` as a fourth field.

    Raises:
        TypeError: config is not a `ScalerConfig`.

    Example:
        >>> init(ScalerConfig(init_scale=8.0)).scale
        tensor(8.)

    References:
        `GradScaler._lazy_init_scale_growth_tracker`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    config = check_config("init", config)
    state = ScalerState(
        scale=torch.full((), config.init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=device),
        found_inf=torch.zeros((), dtype=torch.float32, device=device),
    )
    return with_counters(state, tensors_of(config.rule.first_counters(), device))
