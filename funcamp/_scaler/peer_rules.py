"""The update rules of other libraries, as pure functions of a state and a configuration.

Each is bit for bit its library's rule if the library's scale is a float32. DeepSpeed, apex.amp and fairseq store a
Python float; here every result is rounded to float32. If the factors are powers of two, that changes nothing until the
scale leaves float32's range. tests/scaler/peer_rules.py has every rule in plain Python, with its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcamp._scaler.precision import widen
from funcamp._scaler.rules import Outcome
from funcamp._scaler.state import ScalerState, replace

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig

_FLOAT32_MAX = torch.finfo(torch.float32).max


def _times32(scale: Tensor, factor: float) -> Tensor:
    """Multiply float32 numbers and round once."""
    return (widen(scale) * widen(torch.full_like(scale, factor))).float()


def _times64(scale: Tensor, factor: float) -> Tensor:
    """Multiply in float64, then round to float32."""
    return (widen(scale) * factor).float()


def _over32(scale: Tensor, factor: float) -> Tensor:
    # by a tensor: a CUDA kernel multiplies by the reciprocal of a Python number instead
    return (widen(scale) / widen(torch.full_like(scale, factor))).float()


def _over64(scale: Tensor, factor: float) -> Tensor:
    wide = widen(scale)
    return (wide / torch.full_like(wide, factor)).float()


def _if_finite(grown: Tensor, scale: Tensor) -> Tensor:
    return torch.where(torch.isfinite(grown), grown, scale)


def _due(state: Any, steps: int) -> Tensor:
    due: Tensor = (state.found_inf == 0) & (state.growth_tracker + 1 == steps)
    return due


def _due_again(state: Any, steps: int, first: int = 0) -> Tensor:
    """Return whether growth is due every `steps` clean steps after `first`, also for a resumed tracker."""
    count = state.growth_tracker + 1 - first
    due: Tensor = (state.found_inf == 0) & (count > 0) & (count % steps == 0)
    return due


def _moved(state: Any, backs_off: Tensor, lower: Tensor, grows: Tensor, higher: Tensor, **counters: Tensor) -> Outcome:
    """Return the outcome of a decision; the growth tracker restarts at growth and at every overflow."""
    tracker = state.growth_tracker + 1
    scale = torch.where(backs_off, lower, torch.where(grows, higher, state.scale))
    tracker = torch.where((state.found_inf != 0) | grows, torch.zeros_like(tracker), tracker)
    moved = replace(state, scale=scale, growth_tracker=tracker)
    return Outcome(replace(moved, counters=counters) if counters else moved, backs_off, grows)


def _refilled(left: Tensor, where: Tensor, config: ScalerConfig) -> Tensor:
    return torch.where(where, torch.full_like(left, config.hysteresis), left)


def megatron(state: Any, config: ScalerConfig) -> Outcome:
    """Count down the hysteresis at every overflow; only growth, which may reach infinity, resets it."""
    found, grows = state.found_inf != 0, _due(state, config.growth_interval)
    left = state.counters["hysteresis_tracker"] - found.int()
    lower, higher = _times32(state.scale, config.backoff_factor), _times32(state.scale, config.growth_factor)
    left_after = _refilled(left, grows, config)
    return _moved(state, found & (left <= 0), lower, grows, higher, hysteresis_tracker=left_after)


def apex_hysteresis(state: Any, config: ScalerConfig) -> Outcome:
    """Apply Megatron's rule with float64 factors and finite growth; any clean step resets the count."""
    found, grows = state.found_inf != 0, _due(state, config.growth_interval)
    left = state.counters["hysteresis_tracker"] - found.int()
    lower = _times64(state.scale, config.backoff_factor)
    higher = _if_finite(_times64(state.scale, config.growth_factor), state.scale)
    left_after = _refilled(left, ~found, config)
    return _moved(state, found & (left <= 0), lower, grows, higher, hysteresis_tracker=left_after)


def apex(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule, but growth beyond the maximum, also to infinity, gives the maximum."""
    higher = _times64(state.scale, config.growth_factor)
    if config.max_scale is not None:
        higher = higher.clamp(max=config.max_scale)
    grows = _due(state, config.growth_interval)
    return _moved(state, state.found_inf != 0, _over64(state.scale, config.growth_factor), grows, higher)


def deepspeed_fp16(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Grow first after growth_interval + 1 clean steps, then after every growth_interval."""
    grows = _due_again(state, config.growth_interval, first=1)
    lower, higher = _over64(state.scale, config.growth_factor), _times64(state.scale, config.growth_factor)
    return _one_ahead(_moved(state, state.found_inf != 0, lower, grows, higher))


def _one_ahead(after: Outcome) -> Outcome:
    tracker = after.state.growth_tracker + after.grows.int()
    return Outcome(replace(after.state, growth_tracker=tracker), after.backs_off, after.grows)


def _deepspeed(state: Any, config: ScalerConfig, grows: Tensor, consecutive: bool) -> Outcome:
    found, left = state.found_inf != 0, state.counters["hysteresis_tracker"]
    backs_off = found & (left <= 1)  # a counter saved by another library may be below 1
    left = _refilled(left - (found & ~backs_off).int(), ~found if consecutive else grows, config)
    lower, higher = _over64(state.scale, config.growth_factor), _times64(state.scale, config.growth_factor)
    return _moved(state, backs_off, lower, grows, higher, hysteresis_tracker=left)


def deepspeed(state: Any, config: ScalerConfig) -> Outcome:
    """Keep the hysteresis used up until growth resets it; the first growth is one clean step late."""
    return _one_ahead(_deepspeed(state, config, _due_again(state, config.growth_interval, first=1), consecutive=False))


def deepspeed_consecutive(state: Any, config: ScalerConfig) -> Outcome:
    """Apply `deepspeed`, with the hysteresis reset by any clean step."""
    return _one_ahead(_deepspeed(state, config, _due_again(state, config.growth_interval, first=1), consecutive=True))


def deepspeed_old(state: Any, config: ScalerConfig) -> Outcome:
    """Apply `deepspeed` of versions before 0.17.1: the first growth is on time."""
    return _deepspeed(state, config, _due_again(state, config.growth_interval), consecutive=False)


def deepspeed_old_consecutive(state: Any, config: ScalerConfig) -> Outcome:
    """Apply `deepspeed_old`, with the hysteresis reset by any clean step."""
    return _deepspeed(state, config, _due_again(state, config.growth_interval), consecutive=True)


def jmp(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule in float32; backoff divides by growth_factor, the tracker is taken modulo."""
    higher = _if_finite(_times32(state.scale, config.growth_factor), state.scale)
    lower, grows = _over32(state.scale, config.growth_factor), _due(state, config.growth_interval)
    after = _moved(state, state.found_inf != 0, lower, grows, higher)
    tracker = after.state.growth_tracker % config.growth_interval
    return Outcome(replace(after.state, growth_tracker=tracker), after.backs_off, after.grows)


def flax(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Grow after growth_interval + 1 clean steps, up to float32's largest number."""
    higher = _times32(state.scale, config.growth_factor).clamp(max=_FLOAT32_MAX)
    grows = _due(state, config.growth_interval + 1)
    return _moved(state, state.found_inf != 0, _times32(state.scale, config.backoff_factor), grows, higher)


def float32_factors(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule with factors rounded to float32 and growth up to infinity: Keras, FSDP on a CPU."""
    lower, higher = _times32(state.scale, config.backoff_factor), _times32(state.scale, config.growth_factor)
    return _moved(state, state.found_inf != 0, lower, _due(state, config.growth_interval), higher)


def tensorflow(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply jmp's rule; a tracker beyond the interval grows too."""
    higher = _if_finite(_times32(state.scale, config.growth_factor), state.scale)
    grows = (state.found_inf == 0) & (state.growth_tracker + 1 >= config.growth_interval)
    return _moved(state, state.found_inf != 0, _over32(state.scale, config.growth_factor), grows, higher)


def paddle(state: Any, config: ScalerConfig) -> Outcome:
    """Back off at every hysteresis-th overflow in a row; growth stays finite."""
    return _paddle(state, config, _if_finite(_times32(state.scale, config.growth_factor), state.scale))


def paddle_dygraph(state: Any, config: ScalerConfig) -> Outcome:
    """Apply `paddle`; growth may reach infinity."""
    return _paddle(state, config, _times32(state.scale, config.growth_factor))


def _paddle(state: Any, config: ScalerConfig, higher: Tensor) -> Outcome:
    found = state.found_inf != 0
    left = state.counters["hysteresis_tracker"] - found.int()
    backs_off = found & (left <= 0)
    left = _refilled(left, backs_off | ~found, config)
    lower, grows = _times32(state.scale, config.backoff_factor), _due(state, config.growth_interval)
    return _moved(state, backs_off, lower, grows, higher, hysteresis_tracker=left)


def fairseq(state: Any, config: ScalerConfig) -> Outcome:
    """Back off if overflows are a large enough share of the steps since the scale last changed.

    At a backoff to stop_scale fairseq raises; here the scale is restored and, as in fairseq, the next clean step grows.
    """
    found, steps = state.found_inf != 0, state.counters["since_rescale"]
    one = torch.ones_like(steps)
    overflows = state.counters["overflows"] + found.int()
    since = torch.where(steps == 0, one * 1000, steps)
    backs_off = found & (widen(overflows.float()) / widen(since.float()) >= config.tolerance)
    grows = _due_again(state, config.growth_interval)
    lower = _over64(state.scale, config.growth_factor)
    if config.min_scale is not None:
        lower = lower.clamp(min=config.min_scale)
    after = _moved(state, backs_off, lower, grows, _times64(state.scale, config.growth_factor))
    stops = found & (widen(after.state.scale) <= (config.stop_scale or 0.0))
    new = replace(
        after.state,
        scale=torch.where(stops, state.scale, after.state.scale),
        growth_tracker=torch.where(stops, one * (config.growth_interval - 1), after.state.growth_tracker),
        counters={
            "since_rescale": torch.where(backs_off | grows, one, steps + 1) - stops.int(),
            "overflows": torch.where(backs_off, torch.zeros_like(overflows), overflows),
        },
    )
    return Outcome(new, backs_off | stops, grows)
