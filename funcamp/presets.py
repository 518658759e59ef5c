"""Scaler configurations of torch and other libraries, with their argument names and defaults.

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
    """Return the configuration with the rule of `torch.amp.GradScaler`, from the same arguments.

    `enabled=False` returns `disabled()`.

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
    """Return torch's rule preceded by a fast search for the initial scale.

    During the search, overflows divide the scale by 2, 4, 16, 256, ... until a step is clean. Clean steps then double
    it, up to about a quarter of the last scale that overflowed, to the first overflow (the scale is then divided by
    4), to max_scale, or to 2**24. After the search the rule is torch's. Use it if init_scale may be far off: compared
    with torch's rule it skips one or two more steps if init_scale is right, and a third as many if it is 2**15 too
    high.

    Example:
        >>> presets.warm_start(init_scale=2.0**24).rule
        'warm_start'

    References:
        benchmarks/warm_start.py has the comparison.
    """
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval, None, max_scale, "warm_start")


def static(scale: float) -> ScalerConfig:
    """Return a configuration with a constant scale; steps with non-finite gradients are still skipped.

    Args:
        scale: the scale; positive, finite in float32.

    Example:
        >>> presets.static(128.0).rule
        'static'
    """
    return ScalerConfig(init_scale=scale, rule="static")


def disabled() -> ScalerConfig:
    """Return a configuration with the constant scale 1, for bfloat16 or float32 runs of a program.

    Gradients are still checked and a step with a non-finite gradient is still skipped;
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
    """Return the rule of Megatron-LM's `DynamicGradScaler`.

    The hysteresis-th overflow and every later one lower the scale. Only growth resets the count. Growth may reach
    infinity.

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
    """Return the rule of DeepSpeed's `DynamicLossScaler`, 0.17.1 or later.

    The defaults are those of its fp16 section. The delayed_shift-th overflow and every later one lower the scale, until
    the count is reset: by growth, or with consecutive_hysteresis by any clean step. The first growth takes scale_window
    + 1 clean steps. If the scale is at its minimum, DeepSpeed raises; here `exhausted` is set. The scale is float32;
    DeepSpeed's is a Python float.

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
    """Return the rule of DeepSpeed 0.9.0 to 0.17.0: any factor, first growth after scale_window steps.

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
    """Return the rule of DeepSpeed's `FP16_Optimizer`.

    No hysteresis; the first growth takes scale_window + 1 clean steps. `FP16_UnfusedOptimizer` uses it with 2**16, 1000
    and 0.25. The scale is float32; DeepSpeed's is a Python float.

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
    """Return the rule of apex.amp's `LossScaler`.

    The factors are 2 and 1/2, because apex ignores its scale_factor. The scale is float32; apex's is a Python float.

    Example:
        >>> presets.apex().max_scale
        16777216.0

    References:
        apex/amp/scaler.py, NVIDIA/apex before amp was removed.
    """
    least = None if min_loss_scale == 0 else min_loss_scale
    ScalerConfig(init_scale, 2.0, 0.5, scale_window, least, None, "apex")  # checks the arguments before min() compares
    ScalerConfig(max_loss_scale)
    return ScalerConfig(min(max_loss_scale, init_scale), 2.0, 0.5, scale_window, least, max_loss_scale, "apex")


def apex_hysteresis(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> ScalerConfig:
    """Return the rule of apex's `update_scale_hysteresis` kernel, which NeMo calls.

    The hysteresis-th overflow in a row and every later one lower the scale. Any clean step resets the count.

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
    """Return the rule of jmp's `DynamicLossScale` outside jit; under jit jmp loses its min_loss_scale.

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
    """Return the rule of flax's `DynamicScale`: growth after growth_interval + 1 steps.

    Growth stops at float32's largest number.

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
    """Return the rule of Keras 3's `LossScaleOptimizer`: no bounds, so growth may reach infinity.

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
    """Return the rule of tf.keras's `LossScaleOptimizer`: the minimum is 1, growth stays finite.

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
    """Return the rule of Paddle's `update_loss_scaling`: every n-th overflow in a row backs off, to 1.

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
    """Return the rule of `paddle.amp.GradScaler`: `paddle` without a minimum; growth may reach infinity.

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
    """Return the rule of fairseq's `DynamicLossScaler`.

    An overflow backs off if a share of at least tolerance of the steps since the last change overflowed. At
    min_loss_scale fairseq raises FloatingPointError; here the scale stays and `exhausted` is set. The scale is float32;
    fairseq's is a Python float.

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
    """Return the rule of FSDP's `ShardedGradScaler` on a CPU; on a GPU that class uses torch's rule.

    Factors are rounded to float32. Growth may reach infinity.

    Example:
        >>> presets.fsdp_cpu().rule
        'fsdp_cpu'

    References:
        torch/distributed/fsdp/sharded_grad_scaler.py, PyTorch 2.13.
    """
    return ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval, rule="fsdp_cpu")


def _inverse(name: str, factor: object) -> float:
    """Return 1 / factor, because the library divides by the factor that it also multiplies by.

    Raises:
        TypeError: factor is not a number.
        ValueError: factor is not above 1.
    """
    number = real("ScalerConfig", name, factor)
    if not number > 1.0:
        raise ValueError(f"ScalerConfig: {name} must be above 1; got {factor}")
    return 1.0 / number
