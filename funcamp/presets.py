"""Configurations of torch's rule and of every other library's: asked for as the library asks, its names, its defaults.

presets.torch()   presets.warm_start()   presets.static(128.0)   presets.disabled()   presets.megatron()   ...
"""

from __future__ import annotations

from funcamp._check import real
from funcamp._scaler.config import ScalerConfig


def torch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> ScalerConfig:
    """The configuration that `torch.amp.GradScaler` would have with the same arguments.

    `enabled=False` gives `disabled()`.

    Example:
        >>> presets.torch(init_scale=1024.0).init_scale
        1024.0

    References:
        torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    if not enabled:
        return disabled()
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval)


def warm_start(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    max_scale: float | None = None,
) -> ScalerConfig:
    """Torch's rule, after a search for the scale at the start.

    Overflows divide the scale by 2, 4, 16, 256, ... until a step is clean; clean steps double it, up to about a
    quarter of what overflowed last, to the first overflow (then it is quartered), to max_scale, or to 2**24. From
    there on the rule is torch's. Worth it where init_scale may be far off: beside torch's rule it loses a step or
    two more where init_scale is right, and a third of the steps where it is 2**15 too high.

    Example:
        >>> presets.warm_start(init_scale=2.0**24).rule
        'warm_start'

    References:
        benchmarks/warm_start.py has the comparison.
    """
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval, None, max_scale, "warm_start")


def static(scale: float) -> ScalerConfig:
    """A scale that never changes; a step with a non-finite gradient is still skipped.

    Args:
        scale: the scale; positive, finite in float32.

    Example:
        >>> presets.static(128.0).rule
        'static'
    """
    return ScalerConfig(init_scale=scale, rule="static")


def disabled() -> ScalerConfig:
    """A scale of 1 that never changes, for bfloat16 or float32 runs of the same program.

    Gradients are still checked and a step on a non-finite one is still skipped, where
    `torch.amp.GradScaler(enabled=False)` would take it.

    Example:
        >>> presets.disabled().init_scale
        1.0
    """
    return static(1.0)


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> ScalerConfig:
    """The rule of Megatron-LM's `DynamicGradScaler`.

    The hysteresis-th overflow backs off, and every one after it; only growth, which may reach infinity, gives the
    hysteresis back.

    Example:
        >>> presets.megatron().init_scale
        4294967296.0

    References:
        megatron/core/optimizer/grad_scaler.py, megatron-core 0.16.1.
    """
    return ScalerConfig(
        initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, None, "megatron", hysteresis
    )


def deepspeed(
    init_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
) -> ScalerConfig:
    """The rule of DeepSpeed's `DynamicLossScaler`, 0.17.1 or later, with the defaults of its fp16 section.

    The delayed_shift-th overflow backs off, and every one after it until the count is given back: by growth, or
    with consecutive_hysteresis by a clean step. The first growth takes scale_window + 1 clean steps. Where
    DeepSpeed raises at the minimum, `exhausted` is set. In float32, where DeepSpeed has a Python float.

    Example:
        >>> presets.deepspeed(consecutive_hysteresis=True).rule
        'deepspeed_consecutive'

    References:
        deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.19.8.
    """
    rule = "deepspeed_consecutive" if consecutive_hysteresis else "deepspeed"
    return ScalerConfig(init_scale, 2.0, 0.5, scale_window, min_scale, None, rule, delayed_shift)


def deepspeed_old(
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
) -> ScalerConfig:
    """As `deepspeed`, for DeepSpeed 0.9.0 to 0.17.0: any factor, the first growth after scale_window clean steps.

    Example:
        >>> presets.deepspeed_old(scale_window=100).growth_interval
        100

    References:
        deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.17.0.
    """
    rule = "deepspeed_old_consecutive" if consecutive_hysteresis else "deepspeed_old"
    return ScalerConfig(
        init_scale,
        scale_factor,
        _inverse("scale_factor", scale_factor),
        scale_window,
        min_scale,
        None,
        rule,
        delayed_shift,
    )


def deepspeed_fp16(
    init_scale: float = 2.0**32,
    scale_window: int = 1000,
    min_scale: float = 1.0,
) -> ScalerConfig:
    """The rule of DeepSpeed's `FP16_Optimizer`: no hysteresis, the first growth after scale_window + 1 clean steps.

    `FP16_UnfusedOptimizer` has it with 2**16, 1000 and 0.25. In float32, where DeepSpeed has a Python float.

    Example:
        >>> presets.deepspeed_fp16().rule
        'deepspeed_fp16'

    References:
        deepspeed/runtime/fp16/fused_optimizer.py, DeepSpeed 0.9.0 to 0.19.8.
    """
    return ScalerConfig(init_scale, 2.0, 0.5, scale_window, min_scale, None, "deepspeed_fp16")


def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> ScalerConfig:
    """The rule of apex.amp's `LossScaler`: it halves and doubles, whatever scale_factor it is given.

    In float32, where apex has a Python float.

    Example:
        >>> presets.apex().max_scale
        16777216.0

    References:
        apex/amp/scaler.py, NVIDIA/apex before amp was removed.
    """
    least = None if min_loss_scale == 0 else min_loss_scale
    ScalerConfig(init_scale, 2.0, 0.5, scale_window, least, None, "apex")  # checked before it is compared
    ScalerConfig(max_loss_scale)
    return ScalerConfig(min(max_loss_scale, init_scale), 2.0, 0.5, scale_window, least, max_loss_scale, "apex")


def apex_hysteresis(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> ScalerConfig:
    """The rule of apex's `update_scale_hysteresis` kernel, which NeMo calls.

    From the hysteresis-th overflow in a row on each backs off; any clean step gives the hysteresis back.

    Example:
        >>> presets.apex_hysteresis(hysteresis=2).hysteresis
        2

    References:
        csrc/update_scale_hysteresis.cu, NVIDIA/apex.
    """
    return ScalerConfig(
        init_scale, growth_factor, backoff_factor, growth_interval, None, None, "apex_hysteresis", hysteresis
    )


def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2.0,
    min_loss_scale: float = 1.0,
) -> ScalerConfig:
    """The rule of jmp's `DynamicLossScale`, outside jit, which drops its min_loss_scale.

    Example:
        >>> presets.jmp().min_scale
        1.0

    References:
        jmp/_src/loss_scale.py, jmp 0.0.4.
    """
    return ScalerConfig(loss_scale, factor, _inverse("factor", factor), period, min_loss_scale, None, "jmp")


def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = 2.0**-126,
) -> ScalerConfig:
    """The rule of flax's `DynamicScale`: growth takes growth_interval + 1 clean steps, up to float32's largest.

    Example:
        >>> presets.flax().growth_interval
        2000

    References:
        flax/training/dynamic_scale.py, flax 0.12.8.
    """
    return ScalerConfig(scale, growth_factor, backoff_factor, growth_interval, minimum_scale, None, "flax")


def keras(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
) -> ScalerConfig:
    """The rule of Keras 3's `LossScaleOptimizer`: no bound, so growth may reach infinity.

    Example:
        >>> presets.keras().init_scale
        32768.0

    References:
        keras/src/optimizers/loss_scale_optimizer.py, Keras 3.15.1.
    """
    return ScalerConfig(initial_scale, 2.0, 0.5, dynamic_growth_steps, rule="keras")


def tensorflow(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
) -> ScalerConfig:
    """The rule of tf.keras's `LossScaleOptimizer`: a minimum of 1, growth that stays finite.

    Example:
        >>> presets.tensorflow().min_scale
        1.0

    References:
        tf_keras/src/mixed_precision/loss_scale_optimizer.py, tf-keras 2.21.0.
    """
    return ScalerConfig(initial_scale, 2.0, 0.5, dynamic_growth_steps, 1.0, None, "tensorflow")


def paddle(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> ScalerConfig:
    """The rule of Paddle's `update_loss_scaling` kernel: of overflows in a row every n-th backs off, down to 1.

    Example:
        >>> presets.paddle(decr_every_n_nan_or_inf=2).hysteresis
        2

    References:
        paddle/phi/kernels/impl/amp_kernel_impl.h, Paddle 3.3.1.
    """
    return ScalerConfig(
        init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, 1.0, None, "paddle", decr_every_n_nan_or_inf
    )


def paddle_dygraph(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> ScalerConfig:
    """The rule of `paddle.amp.GradScaler`: as `paddle`, without a minimum, and growth may reach infinity.

    Example:
        >>> presets.paddle_dygraph().min_scale is None
        True

    References:
        python/paddle/amp/grad_scaler.py, Paddle 3.3.1.
    """
    rule, every = "paddle_dygraph", decr_every_n_nan_or_inf
    return ScalerConfig(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, None, None, rule, every)


def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> ScalerConfig:
    """The rule of fairseq's `DynamicLossScaler`: an overflow backs off once enough of the steps overflowed.

    Where fairseq raises FloatingPointError, at min_loss_scale, the scale stays and `exhausted` is set. In float32,
    where fairseq has a Python float.

    Example:
        >>> presets.fairseq(tolerance=0.05).tolerance
        0.05

    References:
        fairseq/optim/dynamic_loss_scaler.py, facebookresearch/fairseq at 0d77035e.
    """
    return ScalerConfig(
        init_scale,
        scale_factor,
        _inverse("scale_factor", scale_factor),
        scale_window,
        threshold,
        rule="fairseq",
        tolerance=tolerance,
        stop_scale=min_loss_scale,
    )


def fsdp_cpu(
    init_scale: float = 2.0**16,
    backoff_factor: float = 0.5,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
) -> ScalerConfig:
    """The rule of FSDP's `ShardedGradScaler` on a CPU; on a GPU it has torch's.

    Factors are rounded to float32, and growth may reach infinity.

    Example:
        >>> presets.fsdp_cpu().rule
        'fsdp_cpu'

    References:
        torch/distributed/fsdp/sharded_grad_scaler.py, PyTorch 2.13.
    """
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval, rule="fsdp_cpu")


def _inverse(name: str, factor: object) -> float:
    """1 / factor, for a library that divides by the factor that it multiplies with.

    Raises:
        TypeError: factor is no number.
        ValueError: factor is not above 1.
    """
    number = real("ScalerConfig", name, factor)
    if not number > 1.0:
        raise ValueError(f"ScalerConfig: {name} must be above 1; got {factor}")
    return 1.0 / number
