"""What an update rule is, a value that decides how the scale changes after a step; and the core's two rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from funcamp._scaler.state import ScalerState, widen

if TYPE_CHECKING:
    from funcamp._scaler.config import ScalerConfig


class Outcome(NamedTuple):
    """The result of a rule for one step: the next numbers, and what the rule decided."""

    scale: Tensor
    """float32: the next scale, before the configuration's bounds."""
    growth_tracker: Tensor
    """int32: the next growth tracker."""
    backs_off: Tensor
    """bool: whether the rule answers an overflow at this step: it lowers the scale, if it and the bounds can."""
    grows: Tensor
    """bool: whether the rule raises the scale at this step, if it can."""
    counters: Mapping[str, Tensor] = {}
    """int32 each: the next values of the rule's own counters, by name."""


@dataclass(frozen=True)
class Rule(ABC):
    """An update rule: how the scale changes after a step; for `rule` of `ScalerConfig`.

    A rule is a frozen dataclass. Its fields are Python values: parameters that `ScalerConfig` does not have. So it is
    hashable, equal to a rule of the same class with the same values, and a constant of a compiled graph. A class
    without parameters needs no decorator.

    `outcome` is a pure function of the state, without branches on its tensors. The core applies the configuration's
    bounds to its scale and clears `found_inf`. Override the other methods only if the rule needs them. No sync.

    Example:
        >>> class Gradual(Rule):  # growth at every clean step
        ...     def outcome(self, state, config):
        ...         overflow = state.found_inf != 0
        ...         lower = state.scale * config.backoff_factor
        ...         higher = state.scale * config.growth_factor
        ...         scale = torch.where(overflow, lower, higher)
        ...         return Outcome(scale, state.growth_tracker, backs_off=overflow, grows=~overflow)
        >>> config = ScalerConfig(init_scale=8.0, rule=Gradual())
        >>> update(init(config), config).scale
        tensor(16.)
    """

    divides: ClassVar[bool] = False
    """Whether backoff divides by growth_factor instead of multiplying by backoff_factor."""

    @property
    def name(self) -> str:
        """The name in error messages: the name of the class."""
        return type(self).__name__

    @abstractmethod
    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Return the next scale and what the rule decided.

        Args:
            state: the state after `unscale_and_check`. If the rule has counters, they are in `state.counters`.
            config: the configuration with this rule.
        """

    def first_counters(self) -> dict[str, int]:
        """Return the rule's counters besides growth_tracker, by name, with their values before the first step."""
        return {}

    def check(self, config: ScalerConfig) -> None:
        """Check that a configuration fits the rule; called when one is made with this rule.

        Raises:
            ValueError: it does not fit.
        """
        if self.divides and config.backoff_factor != 1.0 / config.growth_factor:
            raise ValueError(
                f"ScalerConfig: backoff_factor must be 1 / growth_factor for the rule {self.name}, which divides by "
                f"it; got {config.backoff_factor} with growth_factor {config.growth_factor}"
            )


class Torch(Rule):
    """The rule of torch, which `update` describes."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:
        """Apply torch's rule without branches: `_amp_update_scale_`, native/cuda/AmpKernels.cu, PyTorch 2.13."""
        overflow = state.found_inf != 0
        wide_scale = widen(state.scale)
        lower = (wide_scale * config.backoff_factor).float()
        higher = (wide_scale * config.growth_factor).float()
        higher = torch.where(torch.isfinite(higher), higher, state.scale)

        clean_steps = state.growth_tracker + 1
        grows = ~overflow & (clean_steps == config.growth_interval)
        return Outcome(
            scale=torch.where(overflow, lower, torch.where(grows, higher, state.scale)),
            growth_tracker=torch.where(overflow | grows, torch.zeros_like(clean_steps), clean_steps),
            backs_off=overflow,
            grows=grows,
        )


class Static(Rule):
    """The scale never changes."""

    def outcome(self, state: ScalerState, config: ScalerConfig) -> Outcome:  # noqa: ARG002 - a rule's signature
        """Return the scale and the tracker unchanged."""
        never = torch.zeros_like(state.found_inf, dtype=torch.bool)
        return Outcome(state.scale, state.growth_tracker, backs_off=never, grows=never)
