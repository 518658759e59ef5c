"""The rule of FSDP on a CPU."""

from __future__ import annotations

from funcamp._scaler.config import ScalerConfig
from funcamp.rules.megatron import Megatron


def fsdp_cpu(
    init_scale: float = 2.0**16,
    backoff_factor: float = 0.5,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
) -> ScalerConfig:
    """Return the rule of FSDP's `ShardedGradScaler` on a CPU; on a GPU that class uses torch's rule.

    Factors are rounded to float32. Growth may reach infinity.

    Example:
        >>> presets.fsdp_cpu().rule
        Megatron(hysteresis=1)

    References:
        torch/distributed/fsdp/sharded_grad_scaler.py, PyTorch 2.13.
    """
    return ScalerConfig(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        rule=Megatron(),  # its arithmetic, and every overflow backs off
    )
