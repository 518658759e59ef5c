"""The update rules of other libraries, as pure functions of a state and a configuration.

Each is bit for bit its library's rule if the library's scale is a float32. DeepSpeed, apex.amp and fairseq store a
Python float; here every result is rounded to float32. If the factors are powers of two, that changes nothing until the
scale leaves float32's range. tests/rules/peer_rules.py has every rule in plain Python, with its source.
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

#: The scale after a backoff, and after growth.
_Moves = tuple[Tensor, Tensor]


def _moves(
    state: Any, config: ScalerConfig, dtype: torch.dtype = torch.float32, *, divides: bool = False, finite: bool = False
) -> _Moves:
    """Return the moved scales: factors of a dtype, one product or quotient in float64, rounded to float32.

    finite: whether growth that would be infinite keeps the scale.
    """
    wide = widen(state.scale)

    def tensor(factor: float) -> Tensor:  # a CUDA kernel multiplies by the reciprocal of a Python number
        return widen(torch.full_like(state.scale, factor)) if dtype == torch.float32 else torch.full_like(wide, factor)

    lower = wide / tensor(config.growth_factor) if divides else wide * tensor(config.backoff_factor)
    higher = (wide * tensor(config.growth_factor)).float()
    return lower.float(), torch.where(torch.isfinite(higher), higher, state.scale) if finite else higher


def _due(state: Any, steps: int) -> Tensor:
    due: Tensor = (state.found_inf == 0) & (state.growth_tracker + 1 == steps)
    return due


def _due_again(state: Any, steps: int, late: bool = False) -> Tensor:
    """Return whether growth is due every `steps` clean steps, at first one step late; also for a resumed tracker."""
    count = state.growth_tracker + 1 - int(late)
    due: Tensor = (state.found_inf == 0) & (count > 0) & (count % steps == 0)
    return due


def _moved(
    state: Any, moves: _Moves, grows: Tensor, backs_off: Tensor | None = None, start: int = 0, **counters: Tensor
) -> Outcome:
    """Return the outcome of a decision; the tracker restarts at every overflow, and at growth from `start`."""
    found, (lower, higher) = state.found_inf != 0, moves
    backs_off = found if backs_off is None else backs_off
    new = replace(
        state,
        scale=torch.where(backs_off, lower, torch.where(grows, higher, state.scale)),
        growth_tracker=torch.where(found, 0, torch.where(grows, start, state.growth_tracker + 1)),
        counters=counters,  # ignored by a state without
    )
    return Outcome(new, backs_off, grows)


def _counted(
    state: Any, config: ScalerConfig, moves: _Moves, grows: Tensor, refill: str, least: int = -(2**31), start: int = 0
) -> Outcome:
    """Back off once the overflows left are used up; growth refills them, or any clean step, or a backoff too."""
    found = state.found_inf != 0
    left = state.counters["hysteresis_tracker"] - found.int()
    backs_off = found & (left <= 0)
    refilled = {"growth": grows, "clean": ~found, "backoff": ~found | backs_off}[refill]
    left = torch.where(refilled, config.hysteresis, left.clamp(min=least))
    return _moved(state, moves, grows, backs_off, start, hysteresis_tracker=left)


def megatron(state: Any, config: ScalerConfig) -> Outcome:
    """Count down the hysteresis at every overflow; only growth, which may reach infinity, resets it."""
    return _counted(state, config, _moves(state, config), _due(state, config.growth_interval), "growth")


def apex_hysteresis(state: Any, config: ScalerConfig) -> Outcome:
    """Apply Megatron's rule with float64 factors and finite growth; any clean step resets the count."""
    moves = _moves(state, config, torch.float64, finite=True)
    return _counted(state, config, moves, _due(state, config.growth_interval), "clean")


def apex(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule; the bounds turn growth beyond the maximum, also to infinity, into the maximum."""
    moves = _moves(state, config, torch.float64, divides=True)
    return _moved(state, moves, _due(state, config.growth_interval))


def deepspeed_fp16(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Grow first after growth_interval + 1 clean steps, then after every growth_interval."""
    moves = _moves(state, config, torch.float64, divides=True)
    return _moved(state, moves, _due_again(state, config.growth_interval, late=True), start=1)


def deepspeed(state: Any, config: ScalerConfig, refill: str = "growth", late: bool = True) -> Outcome:
    """Keep the hysteresis used up until growth or a clean step refills it; the first growth may be a step late."""
    moves, grows = _moves(state, config, torch.float64, divides=True), _due_again(state, config.growth_interval, late)
    return _counted(state, config, moves, grows, refill, least=1, start=int(late))


def jmp(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule in float32; backoff divides by growth_factor, the tracker is taken modulo."""
    moves = _moves(state, config, divides=True, finite=True)
    after = _moved(state, moves, _due(state, config.growth_interval))
    tracker = after.state.growth_tracker % config.growth_interval
    return Outcome(replace(after.state, growth_tracker=tracker), after.backs_off, after.grows)


def flax(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Grow after growth_interval + 1 clean steps, up to float32's largest number."""
    lower, higher = _moves(state, config)
    return _moved(state, (lower, higher.clamp(max=_FLOAT32_MAX)), _due(state, config.growth_interval + 1))


def float32_factors(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply torch's rule with factors rounded to float32 and growth up to infinity: Keras, FSDP on a CPU."""
    return _moved(state, _moves(state, config), _due(state, config.growth_interval))


def tensorflow(state: ScalerState, config: ScalerConfig) -> Outcome:
    """Apply jmp's rule; a tracker beyond the interval grows too."""
    grows = (state.found_inf == 0) & (state.growth_tracker + 1 >= config.growth_interval)
    return _moved(state, _moves(state, config, divides=True, finite=True), grows)


def paddle(state: Any, config: ScalerConfig, finite: bool = True) -> Outcome:
    """Back off at every hysteresis-th overflow in a row; growth stays finite, except for dygraph."""
    moves = _moves(state, config, finite=finite)
    return _counted(state, config, moves, _due(state, config.growth_interval), "backoff")


def fairseq(state: Any, config: ScalerConfig) -> Outcome:
    """Back off if overflows are a large enough share of the steps since the scale last changed.

    At a backoff to stop_scale fairseq raises; here the scale is restored and, as in fairseq, the next clean step grows.
    """
    found, steps = state.found_inf != 0, state.counters["since_rescale"]
    overflows = state.counters["overflows"] + found.int()
    since = torch.where(steps == 0, 1000, steps)
    backs_off = found & (widen(overflows.float()) / widen(since.float()) >= config.tolerance)
    grows = _due_again(state, config.growth_interval)
    lower, higher = _moves(state, config, torch.float64, divides=True)
    if config.min_scale is not None:
        lower = lower.clamp(min=config.min_scale)
    after = _moved(state, (lower, higher), grows, backs_off).state
    stops = found & (widen(after.scale) <= (config.stop_scale or 0.0))
    new = replace(
        after,
        scale=torch.where(stops, state.scale, after.scale),
        growth_tracker=torch.where(stops, config.growth_interval - 1, after.growth_tracker),
        counters={
            "since_rescale": torch.where(backs_off | grows, 1, steps + 1) - stops.int(),
            "overflows": torch.where(backs_off, 0, overflows),
        },
    )
    return Outcome(new, backs_off | stops, grows)
