"""The table of update rules by name, with the counters of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from funcamp._scaler import peer_rules as peers
from funcamp._scaler import rules

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


class Rule(NamedTuple):
    """One update rule."""

    outcome: Callable[[Any, ScalerConfig], rules.Outcome]
    counters: Callable[[ScalerConfig], dict[str, int]] = lambda _: {}
    """The initial values of the counters besides growth_tracker."""
    divides: bool = False
    """Whether backoff divides by growth_factor."""


def _hysteresis(outcome: Callable[[Any, ScalerConfig], rules.Outcome], *, divides: bool = False) -> Rule:
    """Return a rule that counts the overflows left before a backoff; the count may be negative."""
    return Rule(outcome, lambda config: {"hysteresis_tracker": config.hysteresis}, divides)


RULES: dict[str, Rule] = {
    "dynamic": Rule(rules.dynamic),
    "static": Rule(rules.static),
    "warm_start": Rule(rules.warm_start, lambda _: {"stride": 1}),
    "apex": Rule(peers.apex, divides=True),
    "apex_hysteresis": _hysteresis(peers.apex_hysteresis),
    "deepspeed": _hysteresis(peers.deepspeed, divides=True),
    "deepspeed_consecutive": _hysteresis(partial(peers.deepspeed, refill="clean"), divides=True),
    "deepspeed_old": _hysteresis(partial(peers.deepspeed, late=False), divides=True),
    "deepspeed_old_consecutive": _hysteresis(partial(peers.deepspeed, refill="clean", late=False), divides=True),
    "deepspeed_fp16": Rule(peers.deepspeed_fp16, divides=True),
    "fairseq": Rule(peers.fairseq, lambda _: {"since_rescale": 1, "overflows": 0}, divides=True),
    "flax": Rule(peers.flax),
    "fsdp_cpu": Rule(peers.float32_factors),
    "jmp": Rule(peers.jmp, divides=True),
    "keras": Rule(peers.float32_factors),
    "megatron": _hysteresis(peers.megatron),
    "paddle": _hysteresis(peers.paddle),
    "paddle_dygraph": _hysteresis(partial(peers.paddle, finite=False)),
    "tensorflow": Rule(peers.tensorflow, divides=True),
}
