"""The other libraries' rules, asked for as the library asks: its arguments, its names, its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from funcamp._scaler.constants import Constants, inverse

Config = TypeVar("Config", bound="Presets")


@dataclass(frozen=True)
class Presets(Constants):
    """`ScalerConfig` without torch's own constructors."""

    @classmethod
    def megatron(
        cls: type[Config],
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> Config:
        """The rule of Megatron-LM's `DynamicGradScaler`.

        The hysteresis-th overflow backs off, and every one after it; only growth, which may reach infinity, gives the
        hysteresis back.

        Example:
            >>> ScalerConfig.megatron().init_scale
            4294967296.0

        References:
            megatron/core/optimizer/grad_scaler.py, megatron-core 0.16.1.
        """
        return cls(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, None, "megatron", hysteresis
        )

    @classmethod
    def deepspeed(
        cls: type[Config],
        init_scale: float = 2.0**16,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> Config:
        """The rule of DeepSpeed's `DynamicLossScaler`, 0.17.1 or later, with the defaults of its fp16 section.

        The delayed_shift-th overflow backs off, and every one after it until the count is given back: by growth, or
        with consecutive_hysteresis by a clean step. The first growth takes scale_window + 1 clean steps. Where
        DeepSpeed raises at the minimum, `exhausted` is set. In float32, where DeepSpeed has a Python float.

        Example:
            >>> ScalerConfig.deepspeed(consecutive_hysteresis=True).rule
            'deepspeed_consecutive'

        References:
            deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.19.8.
        """
        rule = "deepspeed_consecutive" if consecutive_hysteresis else "deepspeed"
        return cls(init_scale, 2.0, 0.5, scale_window, min_scale, None, rule, delayed_shift)

    @classmethod
    def deepspeed_old(
        cls: type[Config],
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> Config:
        """As `deepspeed`, for DeepSpeed 0.9.0 to 0.17.0: any factor, the first growth after scale_window clean steps.

        Example:
            >>> ScalerConfig.deepspeed_old(scale_window=100).growth_interval
            100

        References:
            deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.17.0.
        """
        rule = "deepspeed_old_consecutive" if consecutive_hysteresis else "deepspeed_old"
        return cls(
            init_scale,
            scale_factor,
            inverse("scale_factor", scale_factor),
            scale_window,
            min_scale,
            None,
            rule,
            delayed_shift,
        )

    @classmethod
    def deepspeed_fp16(
        cls: type[Config],
        init_scale: float = 2.0**32,
        scale_window: int = 1000,
        min_scale: float = 1.0,
    ) -> Config:
        """The rule of DeepSpeed's `FP16_Optimizer`: no hysteresis, the first growth after scale_window + 1 clean steps.

        `FP16_UnfusedOptimizer` has it with 2**16, 1000 and 0.25. In float32, where DeepSpeed has a Python float.

        Example:
            >>> ScalerConfig.deepspeed_fp16().rule
            'deepspeed_fp16'

        References:
            deepspeed/runtime/fp16/fused_optimizer.py, DeepSpeed 0.9.0 to 0.19.8.
        """
        return cls(init_scale, 2.0, 0.5, scale_window, min_scale, None, "deepspeed_fp16")

    @classmethod
    def apex(
        cls: type[Config],
        init_scale: float = 2.0**16,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> Config:
        """The rule of apex.amp's `LossScaler`: it halves and doubles, whatever scale_factor it is given.

        In float32, where apex has a Python float.

        Example:
            >>> ScalerConfig.apex().max_scale
            16777216.0

        References:
            apex/amp/scaler.py, NVIDIA/apex before amp was removed.
        """
        least = None if min_loss_scale == 0 else min_loss_scale
        cls(init_scale, 2.0, 0.5, scale_window, least, None, "apex")  # checked before it is compared
        cls(max_loss_scale)
        return cls(min(max_loss_scale, init_scale), 2.0, 0.5, scale_window, least, max_loss_scale, "apex")

    @classmethod
    def apex_hysteresis(
        cls: type[Config],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
    ) -> Config:
        """The rule of apex's `update_scale_hysteresis` kernel, which NeMo calls.

        From the hysteresis-th overflow in a row on each backs off; any clean step gives the hysteresis back.

        Example:
            >>> ScalerConfig.apex_hysteresis(hysteresis=2).hysteresis
            2

        References:
            csrc/update_scale_hysteresis.cu, NVIDIA/apex.
        """
        return cls(
            init_scale, growth_factor, backoff_factor, growth_interval, None, None, "apex_hysteresis", hysteresis
        )

    @classmethod
    def jmp(
        cls: type[Config],
        loss_scale: float = 2.0**15,
        period: int = 2000,
        factor: float = 2.0,
        min_loss_scale: float = 1.0,
    ) -> Config:
        """The rule of jmp's `DynamicLossScale`, outside jit, which drops its min_loss_scale.

        Example:
            >>> ScalerConfig.jmp().min_scale
            1.0

        References:
            jmp/_src/loss_scale.py, jmp 0.0.4.
        """
        return cls(loss_scale, factor, inverse("factor", factor), period, min_loss_scale, None, "jmp")

    @classmethod
    def flax(
        cls: type[Config],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scale: float = 65536.0,
        minimum_scale: float | None = 2.0**-126,
    ) -> Config:
        """The rule of flax's `DynamicScale`: growth takes growth_interval + 1 clean steps, up to float32's largest.

        Example:
            >>> ScalerConfig.flax().growth_interval
            2000

        References:
            flax/training/dynamic_scale.py, flax 0.12.8.
        """
        return cls(scale, growth_factor, backoff_factor, growth_interval, minimum_scale, None, "flax")

    @classmethod
    def keras(
        cls: type[Config],
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
    ) -> Config:
        """The rule of Keras 3's `LossScaleOptimizer`: no bound, so growth may reach infinity.

        Example:
            >>> ScalerConfig.keras().init_scale
            32768.0

        References:
            keras/src/optimizers/loss_scale_optimizer.py, Keras 3.15.1.
        """
        return cls(initial_scale, 2.0, 0.5, dynamic_growth_steps, rule="keras")

    @classmethod
    def tensorflow(
        cls: type[Config],
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
    ) -> Config:
        """The rule of tf.keras's `LossScaleOptimizer`: a minimum of 1, growth that stays finite.

        Example:
            >>> ScalerConfig.tensorflow().min_scale
            1.0

        References:
            tf_keras/src/mixed_precision/loss_scale_optimizer.py, tf-keras 2.21.0.
        """
        return cls(initial_scale, 2.0, 0.5, dynamic_growth_steps, 1.0, None, "tensorflow")

    @classmethod
    def paddle(
        cls: type[Config],
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
    ) -> Config:
        """The rule of Paddle's `update_loss_scaling` kernel: of overflows in a row every n-th backs off, down to 1.

        Example:
            >>> ScalerConfig.paddle(decr_every_n_nan_or_inf=2).hysteresis
            2

        References:
            paddle/phi/kernels/impl/amp_kernel_impl.h, Paddle 3.3.1.
        """
        return cls(
            init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, 1.0, None, "paddle", decr_every_n_nan_or_inf
        )

    @classmethod
    def paddle_dygraph(
        cls: type[Config],
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
    ) -> Config:
        """The rule of `paddle.amp.GradScaler`: as `paddle`, without a minimum, and growth may reach infinity.

        Example:
            >>> ScalerConfig.paddle_dygraph().min_scale is None
            True

        References:
            python/paddle/amp/grad_scaler.py, Paddle 3.3.1.
        """
        rule, every = "paddle_dygraph", decr_every_n_nan_or_inf
        return cls(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, None, None, rule, every)

    @classmethod
    def fairseq(
        cls: type[Config],
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.0,
        threshold: float | None = None,
        min_loss_scale: float = 1e-4,
    ) -> Config:
        """The rule of fairseq's `DynamicLossScaler`: an overflow backs off once enough of the steps overflowed.

        Where fairseq raises FloatingPointError, at min_loss_scale, the scale stays and `exhausted` is set. In float32,
        where fairseq has a Python float.

        Example:
            >>> ScalerConfig.fairseq(tolerance=0.05).tolerance
            0.05

        References:
            fairseq/optim/dynamic_loss_scaler.py, facebookresearch/fairseq at 0d77035e.
        """
        return cls(
            init_scale,
            scale_factor,
            inverse("scale_factor", scale_factor),
            scale_window,
            threshold,
            rule="fairseq",
            tolerance=tolerance,
            stop_scale=min_loss_scale,
        )

    @classmethod
    def fsdp_cpu(
        cls: type[Config],
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
    ) -> Config:
        """The rule of FSDP's `ShardedGradScaler` on a CPU; on a GPU it has torch's.

        Factors are rounded to float32, and growth may reach infinity.

        Example:
            >>> ScalerConfig.fsdp_cpu().rule
            'fsdp_cpu'

        References:
            torch/distributed/fsdp/sharded_grad_scaler.py, PyTorch 2.13.
        """
        return cls(init_scale, growth_factor, backoff_factor, growth_interval, rule="fsdp_cpu")
