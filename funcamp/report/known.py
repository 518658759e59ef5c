"""What is known about one gradient, one scaler and one optimizer of a loop."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from funcamp.report.events import Backward, Key, StepEnded
from funcamp.report.lines import UNKNOWN, CallSite, Line


class Condition(enum.Enum):
    """What a parameter's gradient is: what was done to it last."""

    ABSENT = enum.auto()
    """There is none, or it is zero."""
    PLAIN = enum.auto()
    """The loss was not scaled."""
    SCALED = enum.auto()
    """It is multiplied by the scale."""
    UNSCALED = enum.auto()
    """Divided by the scale, by `unscale_` or by the loop itself."""
    USED = enum.auto()
    """A step has used it, and it was not cleared since."""

    # Sums of gradients in different conditions, which no factor can correct.
    SCALED_ON_UNSCALED = enum.auto()
    """A scaled gradient was added to an unscaled one."""
    SCALED_AND_PLAIN = enum.auto()
    """A scaled gradient, and one of a loss that was not scaled."""
    TWO_SCALES = enum.auto()
    """Gradients that were scaled by different scales."""
    ON_USED = enum.auto()
    """A gradient was added to one that a step had used."""


_MIXTURES = (
    Condition.SCALED_ON_UNSCALED,
    Condition.SCALED_AND_PLAIN,
    Condition.TWO_SCALES,
    Condition.ON_USED,
)


@dataclass(frozen=True)
class Gradient:
    """What is known about a parameter's gradient."""

    condition: Condition = Condition.ABSENT
    line: Line = UNKNOWN
    """The call that put it into this condition."""
    scaler: Key | None = None
    """For a scaled gradient: the scaler."""
    updates: int = 0
    """How many updates the scaler had had when it scaled the loss."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """The 16-bit dtypes of its forward passes."""
    plain_line: Line | None = None
    """A backward pass of an unscaled loss that added to it."""
    clipped_line: Line | None = None
    """Where it was clipped after the loop itself had written it, and not divided it by the scale: a mistake only if a
    scaler unscales it afterwards."""
    divided_line: Line | None = None
    """Where the loop itself divided it by the scale, if it wrote nothing else into it since."""
    is_clipped: bool = False
    """Whether it was clipped before a step used it."""
    late_clip_line: Line | None = None
    """Where it was clipped only after a step had used it."""
    finite_line: Line | None = None
    """Where inf and NaN in it were replaced by numbers."""
    is_written: bool = False
    """Whether the loop itself multiplied or replaced it, for example divided by the scale or by a number of batches."""

    def after(self, event: Backward, updates: int) -> Gradient:
        """Return the gradient after a backward pass has added to it.

        updates: how many updates the scaler of the pass has had.
        """
        is_plain = event.scaler is None
        added = Gradient(
            condition=Condition.PLAIN if is_plain else Condition.SCALED,
            line=event.line,
            scaler=event.scaler,
            updates=updates,
            dtypes=event.dtypes,
            plain_line=event.line if is_plain else None,
        )
        if self.condition is Condition.ABSENT:
            return added
        plain_line = added.plain_line or self.plain_line
        added = replace(added, dtypes=self.dtypes | event.dtypes, plain_line=plain_line, is_written=self.is_written)
        mixture = self._mixture_with(added)
        if mixture is not None:
            return replace(added, condition=mixture)
        if self.condition in _MIXTURES:  # the first mixture stays, with the line that made it
            return replace(self, dtypes=added.dtypes, plain_line=added.plain_line)
        return replace(self, line=event.line, dtypes=added.dtypes)

    def _mixture_with(self, added: Gradient) -> Condition | None:
        """Return what the sum with another gradient mixes; None if the sum is in the condition of this gradient."""
        if self.condition is Condition.USED:
            return Condition.ON_USED
        if self.condition is Condition.UNSCALED and added.condition is Condition.SCALED:
            return Condition.SCALED_ON_UNSCALED
        if {self.condition, added.condition} == {Condition.PLAIN, Condition.SCALED}:
            return Condition.SCALED_AND_PLAIN
        if self.condition is Condition.SCALED and (self.scaler, self.updates) != (added.scaler, added.updates):
            return Condition.TWO_SCALES
        return None


@dataclass
class Scaler:
    """What is known about a `GradScaler`."""

    made_line: Line = UNKNOWN
    made_at: tuple[CallSite, ...] = ()
    """Where each calling function of the user was when it was made, the outermost first."""
    updates: int = 0
    passes: int = 0
    """The number of backward passes of losses that it scaled."""
    unscaled: set[Key] = field(default_factory=set)
    """The optimizers that were unscaled since the last update."""
    is_factor: bool = False
    """Whether the loop has multiplied or divided by its scale."""
    loss_lines: Counter[Line] = field(default_factory=Counter)
    """The lines that read a loss on the host that it scaled, and how often each did."""
    last_read_line: Line = UNKNOWN
    """The last line that read its scale since its last update."""
    is_saved: bool = False


@dataclass
class Optimizer:
    """What is known about an optimizer."""

    parameters: tuple[Key, ...] = ()
    name: str = "an optimizer"
    """Its class."""
    made_line: Line = UNKNOWN
    scaler: Key | None = None
    """The scaler that stepped it last."""
    steps: int = 0
    empty_steps: int = 0
    """Those of its steps that found no gradient."""
    passes: int = 0
    """The number of backward passes that added to its gradients."""
    clears: int = 0
    """How often gradients of it were cleared that no step had used."""
    window: list[Backward] = field(default_factory=list)
    """The backward passes that added to its gradients since its last step, or since they were cleared."""
    last_pass: Backward | None = None
    """The last backward pass that added to its gradients."""
    cleared_line: Line | None = None
    """Where its gradients were cleared after a backward pass, if no other pass followed."""
    is_restored: bool = False
    """Whether its state was loaded since its last step, from a file or from a copy."""
    stepped_line: Line | None = None
    """Where an enabled scaler has stepped it, if its gradients are those of that step."""
    applied: int = 0
    """How many of its steps were applied."""
    skips: list[StepEnded] = field(default_factory=list)
    """Its skipped steps since the last one that was applied."""
    has_own_passes: bool = False
    """Whether a backward pass reached its parameters and none of another optimizer."""

    def __str__(self) -> str:
        return self.name if self.made_line == UNKNOWN else f"{self.name}, made at {self.made_line}"
