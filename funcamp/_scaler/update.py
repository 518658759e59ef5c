"""The update of the scale after a step; and whether it should fall or grow and cannot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._scaler.config import ScalerConfig, check_state_and_config, positive_float32
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState, check_state, replace


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
    if new_scale is not None:
        scale = _bounded(_new_scale(state, new_scale), config)
        return replace(state, scale=scale, found_inf=torch.zeros_like(state.found_inf))
    return decide(state, config).next_state()


class Decision(NamedTuple):
    """What the rule decides after a step, and the next scale, within the configuration's bounds."""

    state: ScalerState
    """The state with the flag of the step."""
    outcome: Outcome
    scale: Tensor

    def next_state(self) -> ScalerState:
        """Return the state after the update; the counters are ignored by a state without."""
        return replace(
            self.state,
            scale=self.scale,
            growth_tracker=self.outcome.growth_tracker,
            found_inf=torch.zeros_like(self.state.found_inf),
            counters=self.outcome.counters,
        )

    def exhausted(self) -> Tensor:
        """Return whether the rule lowers the scale and it cannot fall."""
        cannot_fall = ~(self.scale < self.state.scale) | (self.scale == 0)
        return self.outcome.backs_off & cannot_fall

    def saturated(self) -> Tensor:
        """Return whether the rule raises the scale and it cannot grow."""
        cannot_grow = ~(self.scale > self.state.scale) | torch.isinf(self.scale)
        return self.outcome.grows & cannot_grow


def decide(state: ScalerState, config: ScalerConfig) -> Decision:
    """Return the decision of the configuration's rule, called once in a step."""
    outcome = config.rule.outcome(state, config)
    return Decision(state, outcome, _bounded(outcome.scale, config))


def _bounded(scale: Tensor, config: ScalerConfig) -> Tensor:
    """Return the scale clamped to [min_scale, max_scale]."""
    return scale.clamp(config.min_scale, config.max_scale) if config.has_bounds else scale


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
    return torch.full_like(state.scale, positive_float32("update", "new_scale", value, "a float32 tensor or a number"))


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
    return decide(state, config).exhausted()


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
    return decide(state, config).saturated()


def merge(*states: ScalerState) -> ScalerState:
    """Combine the flags of states that share a scale: optimizers that skip independently, one update.

    found_inf = 1 if any state's found_inf != 0, else 0. The other fields come from the first state. The caller must
    guarantee that all states have the same scale; checking would synchronize. If their scales differ (a scaler per
    loss), use the result only for `skip_step`. Pure; safe under torch.compile and vmap; no sync.

    Args:
        *states: one state or more, all unscaled and checked from the same one.

    Returns:
        The state for `update`.

    Raises:
        TypeError: no state is given, or one is not a scaler state, or they have different types.

    Example:
        >>> state = init()
        >>> _, generator = unscale_and_check(state, torch.tensor(float("inf")))
        >>> _, critic = unscale_and_check(state, torch.tensor(1.0))
        >>> merge(generator, critic).found_inf
        tensor(1.)

    References:
        `GradScaler.update` sums the flags of its optimizers, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    if not states:
        raise TypeError("merge: states must be one scaler state or more; got none")
    first = check_state("merge", states[0])
    is_found = first.found_inf != 0
    for other in states[1:]:
        if type(other) is not type(first):
            raise TypeError(f"merge: states must be of one type; got {type(first).__name__} and {other!r}")
        is_found_in_other = check_state("merge", other).found_inf != 0
        is_found = is_found | is_found_in_other.to(is_found.device)
    return replace(first, found_inf=is_found.float())
