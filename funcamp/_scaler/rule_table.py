"""Which rule a configuration names, what state it needs, and how its outcome is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from funcamp._scaler import peer_rules as peers
from funcamp._scaler import torch_rule as rules
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.state import HysteresisState, ScalerState, ToleranceState, WarmUpState, replace


class Rule(NamedTuple):
    """A rule, the type of state it works on, and the first values of the fields that ScalerState lacks."""

    outcome: Callable[[Any, ScalerConfig], rules.Outcome]
    state: type[Any] = ScalerState
    first: Callable[[ScalerConfig], tuple[int, ...]] = lambda _: ()


def _hysteresis(outcome: Callable[[Any, ScalerConfig], rules.Outcome]) -> Rule:
    return Rule(outcome, HysteresisState, lambda config: (config.hysteresis,))


RULES: dict[str, Rule] = {
    "dynamic": Rule(rules.dynamic),
    "static": Rule(rules.static),
    "warm_start": Rule(rules.warm_start, WarmUpState, lambda _: (1,)),
    "apex": Rule(peers.apex),
    "apex_hysteresis": _hysteresis(peers.apex_hysteresis),
    "deepspeed": _hysteresis(peers.deepspeed),
    "deepspeed_consecutive": _hysteresis(peers.deepspeed_consecutive),
    "deepspeed_old": _hysteresis(peers.deepspeed_old),
    "deepspeed_old_consecutive": _hysteresis(peers.deepspeed_old_consecutive),
    "deepspeed_fp16": Rule(peers.deepspeed_fp16),
    "fairseq": Rule(peers.fairseq, ToleranceState, lambda _: (1, 0)),
    "flax": Rule(peers.flax),
    "fsdp_cpu": Rule(peers.float32_factors),
    "jmp": Rule(peers.jmp),
    "keras": Rule(peers.float32_factors),
    "megatron": _hysteresis(peers.megatron),
    "paddle": _hysteresis(peers.paddle),
    "paddle_dygraph": _hysteresis(peers.paddle_dygraph),
    "tensorflow": Rule(peers.tensorflow),
}


def state_type(config: ScalerConfig) -> type[Any]:
    """The class of the states of a configuration's rule."""
    return RULES[config.rule].state


def first_counters(config: ScalerConfig) -> dict[str, int]:
    """The fields that a rule's state has beside ScalerState's, and their first values."""
    rule = RULES[config.rule]
    return dict(zip(rule.state._fields[3:], rule.first(config)))


def init(config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None) -> ScalerState:
    """Make the state before the first step.

    scale = init_scale, growth_tracker = 0, found_inf = 0. Nothing is lazy. Pure; no sync.

    Args:
        config: the configuration; the same one goes to `update`.
        device: where the state lives: the device of the gradients. None for torch's default device.

    Returns:
        A `ScalerState`; for a rule that counts more, a `HysteresisState`, `ToleranceState` or `WarmUpState`.

    Raises:
        TypeError: config is no `ScalerConfig`.

    Example:
        >>> init(ScalerConfig(init_scale=8.0)).scale
        tensor(8.)

    References:
        `GradScaler._lazy_init_scale_growth_tracker`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    config = check_config("init", config)
    counters = first_counters(config)
    kind = cast("type[ScalerState]", state_type(config))
    return kind(
        scale=torch.full((), config.init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=device),
        found_inf=torch.zeros((), dtype=torch.float32, device=device),
        **{name: torch.full((), value, dtype=torch.int32, device=device) for name, value in counters.items()},
    )


def outcome(state: ScalerState, config: ScalerConfig) -> rules.Outcome:
    """What the configuration's rule makes of a step, before its bounds."""
    return RULES[config.rule].outcome(state, config)


def bounded(state: ScalerState, config: ScalerConfig) -> ScalerState:
    """The state with its scale clamped to [min_scale, max_scale]."""
    if config.min_scale is None and config.max_scale is None:
        return state
    return replace(state, scale=state.scale.clamp(config.min_scale, config.max_scale))


def check_suits(call: str, state: ScalerState, config: ScalerConfig) -> None:
    """Raise TypeError where the state lacks what the configuration's rule counts."""
    kind = state_type(config)
    known = type(state) in (ScalerState, HysteresisState, ToleranceState, WarmUpState)
    if type(state) is not kind if known else state._fields[: len(kind._fields)] != kind._fields:
        raise TypeError(
            f"{call}: state must be a {kind.__name__}, as init makes it for the rule {config.rule!r}; "
            f"got {type(state).__name__} (config must be the one that the state was made with)"
        )
