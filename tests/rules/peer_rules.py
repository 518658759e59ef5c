"""How other libraries update a loss scale, in plain Python: what funcamp's peer rules are measured against.

A class takes the arguments of its rule under the library's names and in its order; what does not bear on the rule
(devices, process groups, the wrapped optimizer) is left out. A default is the constructor's own; where the constructor
has none, it is what the library's own caller passes. `scale` is a value that float32 holds, counters go by the
library's names, and `update` is one step. Where a library raises, `raised` is True for that step, and the state is what
the exception leaves behind. torch's own class is taken as it is.

Libraries that keep the scale in a Python float are stated in float32: every result is rounded. Subnormal scales are
kept, as IEEE has it; XLA and TensorFlow on a CPU and apex's kernel (built with --use_fast_math) flush them to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.support.oracle import float32

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126


def mul32(a: float, b: float) -> float:
    """A float32 product of float32 operands; a double holds it exactly, so it is rounded once."""
    return float32(float32(a) * float32(b))


def div32(a: float, b: float) -> float:
    """A float32 quotient of float32 operands; a double's rounding before it changes nothing."""
    return float32(float32(a) / float32(b))


def mul64(a: float, b: float) -> float:
    """A double product, then rounded to float32: the factor keeps all its bits."""
    return float32(a * b)


def div64(a: float, b: float) -> float:
    """A double quotient, then rounded to float32."""
    return float32(a / b)


class Library:
    """A rule whose first scale is the argument that `first` names, rounded to float32."""

    first = "init_scale"
    scale: float

    def __post_init__(self) -> None:
        self.scale = float32(getattr(self, self.first))


@dataclass
class Megatron(Library):
    """`DynamicGradScaler`, megatron/core/optimizer/grad_scaler.py, NVIDIA/Megatron-LM (megatron-core 0.16.1).

    Hysteresis comes back on growth alone, so the overflows it forgives need not be consecutive. Growth reaches inf.
    Factors are float32 tensors. The defaults are what Megatron passes from `OptimizerConfig`.
    """

    first = "initial_scale"
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    _growth_tracker = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hysteresis_tracker = self.hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(mul32(self.scale, self.backoff_factor), float32(self.min_scale))
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self.scale = mul32(self.scale, self.growth_factor)
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis


@dataclass
class DeepSpeedDynamic(Library):
    """`DynamicLossScaler`, deepspeed/runtime/fp16/loss_scaler.py, DeepSpeed 0.17.1 to 0.19.8: a Python float.

    Counts iterations, not good steps; at the minimum it raises before either counter moves. A spent hysteresis stays at
    1, so every later overflow backs off until it is refilled: at growth, or by any clean step where it is consecutive.
    The factor is always 2 and no argument has a default; those here are the `fp16` section's.
    """

    init_scale: float = 2.0**16
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    scale_factor = 2.0
    cur_iter = 0
    last_overflow_iter = -1
    raised = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cur_hysteresis = self.delayed_shift

    def update(self, found_inf: bool) -> None:
        self.raised = False
        if found_inf:
            floor = float32(self.min_scale)
            if self.delayed_shift != 1 and self.cur_hysteresis != 1:
                self.cur_hysteresis -= 1
            elif self.scale == floor and self.raise_error_at_min_scale:
                self.raised = True
                return
            else:
                self.scale = max(div64(self.scale, self.scale_factor), floor)
            self.last_overflow_iter = self.cur_iter
        else:
            # At good step `scale_window + 1`, and at every `scale_window`-th after it.
            stable = self.cur_iter - self.last_overflow_iter - 1
            grows = stable > 0 and stable % self.scale_window == 0
            if grows or self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if grows:
                self.scale = mul64(self.scale, self.scale_factor)
        self.cur_iter += 1


@dataclass
class DeepSpeedFP16(Library):
    """`FP16_Optimizer._update_scale`, deepspeed/runtime/fp16/fused_optimizer.py, DeepSpeed 0.9.0 to 0.19.8.

    The first growth comes after `scale_window + 1` good steps, later ones `scale_window` apart; no hysteresis, no error
    at the minimum. `FP16_UnfusedOptimizer` has the same rule and defaults of 2**16, 1000 and 0.25.
    """

    init_scale: float = 2.0**32
    scale_window: int = 1000
    min_scale: float = 1.0
    scale_factor = 2.0
    cur_iter = 0
    last_overflow_iter = -1

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(div64(self.scale, self.scale_factor), float32(self.min_scale))
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.scale = mul64(self.scale, self.scale_factor)
        self.cur_iter += 1


@dataclass
class ApexAmp(Library):
    """`LossScaler`, apex/amp/scaler.py, NVIDIA/apex (b82c6bd7; the first clamp is later, read in a 2025 fork).

    With `loss_scale="dynamic"`. It has a `scale_factor` that is never read: it halves and doubles. A `min_loss_scale`
    of 0 is no minimum. The growth test follows an overflow too, so a `scale_window` of 0 undoes each backoff.
    """

    init_scale: float = 2.0**16
    scale_window: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    _unskipped = 0

    def __post_init__(self) -> None:
        self.scale = float32(min(self.max_loss_scale, self.init_scale))

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = float32(max(self.min_loss_scale or 0.0, self.scale / 2.0))
            self._unskipped = 0
        else:
            self._unskipped += 1
        if self._unskipped == self.scale_window:
            self.scale = float32(min(self.max_loss_scale, self.scale * 2.0))
            self._unskipped = 0


@dataclass
class ApexHysteresis(Library):
    """`update_scale_hysteresis`, csrc/update_scale_hysteresis.cu, NVIDIA/apex (79b7f4f2, 16aaa783).

    Any clean step refills the hysteresis; a forgiven overflow still resets the growth tracker. The factors are doubles.
    Growth to inf is dropped. The defaults are those of NeMo's `GradScaler`, which calls it.
    """

    first = "current_scale"
    current_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    growth_tracker = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hysteresis_tracker = self.hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = mul64(self.scale, self.backoff_factor)
            return
        self.hysteresis_tracker = self.hysteresis
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = mul64(self.scale, self.growth_factor)
            self.scale, self.growth_tracker = (grown if math.isfinite(grown) else self.scale), 0


@dataclass
class Jmp(Library):
    """`DynamicLossScale.adjust`, jmp/_src/loss_scale.py, google-deepmind/jmp (jmp 0.0.4), not under `jit`.

    Backoff divides. Under `jit` a factor other than a power of two becomes a product with its rounded reciprocal, and
    `min_loss_scale` becomes 1. An overflow lifts a scale that is below the minimum.
    """

    first = "loss_scale"
    loss_scale: float = 2.0**15
    counter: int = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(float32(self.min_loss_scale), div32(self.scale, self.factor))
            self.counter = 0
            return
        if self.counter == self.period - 1:
            grown = mul32(self.scale, self.factor)
            self.scale = grown if math.isfinite(grown) else self.scale
        self.counter = (self.counter + 1) % self.period


@dataclass
class Flax(Library):
    """`DynamicScale`, flax/training/dynamic_scale.py, google/flax (flax 0.12.8), `scale` an array.

    Growth is tested before the count, so it takes `growth_interval + 1` good steps, and it stops at float32's largest.
    Where `scale` is still a Python float, as at a first step outside `jit`, the product is a double one.
    """

    first = "scale"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: int = 0
    scale: float = 65536.0
    minimum_scale: float | None = FLOAT32_TINY

    def update(self, found_inf: bool) -> None:
        grow = self.fin_steps == self.growth_interval
        self.fin_steps = 0 if grow or found_inf else self.fin_steps + 1
        if found_inf:
            self.scale = mul32(self.scale, self.backoff_factor)
            if self.minimum_scale is not None:
                self.scale = max(self.scale, float32(self.minimum_scale))
        elif grow:
            self.scale = min(mul32(self.scale, self.growth_factor), FLOAT32_MAX)


@dataclass
class Keras(Library):
    """`LossScaleOptimizer`, keras/src/optimizers/loss_scale_optimizer.py, keras-team/keras (keras 3.15.1).

    The factors are fixed, and there is no bound: growth reaches inf, backoff reaches 0, and both stay.
    """

    first = "initial_scale"
    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    step_counter = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale, self.step_counter = mul32(self.scale, 0.5), 0
        elif self.step_counter == self.dynamic_growth_steps - 1:
            self.scale, self.step_counter = mul32(self.scale, 2.0), 0
        else:
            self.step_counter += 1


@dataclass
class TensorFlow(Library):
    """`_DynamicLossScaleState`, tf_keras/src/mixed_precision/loss_scale_optimizer.py, keras-team/tf-keras (2.21.0).

    The minimum is 1, written in: an overflow lifts a smaller scale to it. Backoff divides, but in a `tf.function` it
    is a product with the rounded reciprocal. The defaults are what `LossScaleOptimizer` passes.
    """

    first = "initial_loss_scale"
    initial_loss_scale: float = 2.0**15
    growth_steps: int = 2000
    multiplier: float = 2.0
    counter = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale, self.counter = max(div32(self.scale, self.multiplier), 1.0), 0
        elif self.counter + 1 >= self.growth_steps:
            grown = mul32(self.scale, self.multiplier)
            self.scale, self.counter = (grown if math.isfinite(grown) else self.scale), 0
        else:
            self.counter += 1


@dataclass
class PaddleKernel(Library):
    """`update_loss_scaling`, paddle/phi/kernels/impl/amp_kernel_impl.h, PaddlePaddle/Paddle (3.3.1, 20ffb9f4).

    Every `decr_every_n_nan_or_inf`-th consecutive overflow backs off; the minimum is 1, written in. The ratios are
    floats. The defaults are those of `paddle.static.amp.decorate`; its older overload has 2**15, 1000, 2, 2.0 and 0.8.
    """

    first = "prev_loss_scaling"
    prev_loss_scaling: float = 2.0**16
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    num_good_steps = 0
    num_bad_steps = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.num_good_steps = 0
            self.num_bad_steps += 1
            if self.num_bad_steps == self.decr_every_n_nan_or_inf:
                self.scale, self.num_bad_steps = max(mul32(self.scale, self.decr_ratio), 1.0), 0
            return
        self.num_bad_steps = 0
        self.num_good_steps += 1
        if self.num_good_steps == self.incr_every_n_steps:
            grown = mul32(self.scale, self.incr_ratio)
            self.scale, self.num_good_steps = (grown if math.isfinite(grown) else self.scale), 0


@dataclass
class PaddleDygraph(Library):
    """`AmpScaler._update`, python/paddle/amp/grad_scaler.py, PaddlePaddle/Paddle (3.3.1): the kernel's rule unbounded.

    No minimum and no guard against inf. `GradScaler` has the same rule and defaults of 2**16 and 2000 steps.
    """

    first = "init_loss_scaling"
    init_loss_scaling: float = 2.0**15
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 1
    _incr_count = 0
    _decr_count = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._incr_count = 0
            self._decr_count += 1
            if self._decr_count == self.decr_every_n_nan_or_inf:
                self.scale, self._decr_count = mul32(self.scale, self.decr_ratio), 0
            return
        self._decr_count = 0
        self._incr_count += 1
        if self._incr_count == self.incr_every_n_steps:
            self.scale, self._incr_count = mul32(self.scale, self.incr_ratio), 0


@dataclass
class Fairseq(Library):
    """`DynamicLossScaler`, fairseq/optim/dynamic_loss_scaler.py, facebookresearch/fairseq (0d77035e): a Python float.

    An overflow calls `check_overflow`, a clean step `update`. At the minimum the old scale comes back and `_iter` does
    not move, but the overflow is noted: a clean step right after it grows. `raised` leaves out the OverflowError of any
    other overflow. (fairseq 0.12.2 divides by zero where `since_rescale` is 1000 here.)
    """

    init_scale: float = 2.0**15
    scale_factor: float = 2.0
    scale_window: int = 2000
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 1e-4
    _iter = 0
    _last_overflow_iter = -1
    _last_rescale_iter = -1
    _overflows_since_rescale = 0
    raised = False

    def update(self, found_inf: bool) -> None:
        self.raised = False
        if found_inf:
            self._overflow()
        elif (self._iter - self._last_overflow_iter) % self.scale_window == 0:
            self.scale = mul64(self.scale, self.scale_factor)
            self._last_rescale_iter = self._iter
        if not self.raised:
            self._iter += 1

    def _overflow(self) -> None:
        before = self.scale
        since_rescale = self._iter - self._last_rescale_iter or 1000
        self._last_overflow_iter = self._iter
        self._overflows_since_rescale += 1
        if self._overflows_since_rescale / since_rescale >= self.tolerance:
            self.scale = div64(self.scale, self.scale_factor)
            if self.threshold is not None:
                self.scale = max(self.scale, float32(self.threshold))
            self._last_rescale_iter = self._iter
            self._overflows_since_rescale = 0
        if self.scale <= self.min_loss_scale:
            self.scale, self.raised = before, True


class ShardedCpu:
    """torch's own `ShardedGradScaler`; backoff comes first in its arguments."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_interval = growth_interval
        numbers = (init_scale, backoff_factor, growth_factor, growth_interval)
        self.scaler: Any = ShardedGradScaler("cpu", *numbers, process_group=None)
        self.scaler.scale(torch.zeros(()))

    @property
    def scale(self) -> float:
        scale: float = self.scaler.get_scale()
        return scale

    def update(self, found_inf: bool) -> None:
        flags = {torch.device("cpu"): torch.full((1,), float(found_inf))}
        self.scaler._per_optimizer_states[0] = {"stage": None, "found_inf_per_device": flags}
        self.scaler.update()
