"""Scaler configurations of torch and other libraries, with their argument names and defaults.

presets.torch()   presets.static(128.0)   presets.disabled()   presets.megatron()   ...
"""

from __future__ import annotations

from funcamp._check import boolean
from funcamp._scaler.config import ScalerConfig
from funcamp._scaler.rule import Static
from funcamp.rules.apex import apex, apex_hysteresis
from funcamp.rules.deepspeed import deepspeed, deepspeed_fp16
from funcamp.rules.fairseq import fairseq
from funcamp.rules.flax import flax
from funcamp.rules.fsdp import fsdp_cpu
from funcamp.rules.jmp import jmp
from funcamp.rules.keras import keras
from funcamp.rules.megatron import megatron
from funcamp.rules.paddle import paddle, paddle_dygraph
from funcamp.rules.tensorflow import tensorflow

__all__ = [
    "torch",
    "static",
    "disabled",
    "megatron",
    "deepspeed",
    "deepspeed_fp16",
    "apex",
    "apex_hysteresis",
    "jmp",
    "flax",
    "keras",
    "tensorflow",
    "paddle",
    "paddle_dygraph",
    "fairseq",
    "fsdp_cpu",
]


def torch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> ScalerConfig:
    """Return the configuration with the rule of `torch.amp.GradScaler`, from the same arguments.

    `enabled=False` returns `disabled()`.

    Example:
        >>> presets.torch(init_scale=1024.0).init_scale
        1024.0

    References:
        torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    if not boolean("presets.torch", "enabled", enabled):
        return disabled()
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval)


def static(scale: float) -> ScalerConfig:
    """Return a configuration with a constant scale; steps with non-finite gradients are still skipped.

    Args:
        scale: the scale; positive, finite in float32.

    Example:
        >>> presets.static(128.0).rule
        Static()
    """
    return ScalerConfig(init_scale=scale, rule=Static())


def disabled() -> ScalerConfig:
    """Return a configuration with the constant scale 1, for bfloat16 or float32 runs of a program.

    Gradients are still checked and a step with a non-finite gradient is still skipped;
    `torch.amp.GradScaler(enabled=False)` would take it.

    Example:
        >>> presets.disabled().init_scale
        1.0
    """
    return static(1.0)
