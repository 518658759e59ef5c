"""The state machine: what is known about a loop's gradients, optimizers and scalers after each event."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import NamedTuple

import torch

from funcamp._audit.events import (
    Backward,
    CastToFloat16,
    Cleared,
    Clipped,
    Event,
    FileLoaded,
    FileSaved,
    GradientRead,
    GradientsAssigned,
    GradientsTaken,
    GradientWritten,
    Key,
    NonfiniteReplaced,
    OptimizerLoaded,
    OptimizerMade,
    OutOfRange,
    Overflowed,
    ReadsCancelled,
    ReadsUsed,
    Reduced,
    ScaledLossRead,
    ScaleRead,
    ScalerLoaded,
    ScalerMade,
    ScalerSaved,
    SchedulerStepped,
    StepCalled,
    StepEnded,
    Unscaled,
    Updated,
)
from funcamp._audit.lines import UNKNOWN, Line, Place


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
    MIXED = enum.auto()
    """It is a sum of gradients in different conditions, which no factor can correct."""


class Mixture(enum.Enum):
    """What a mixed gradient is a sum of."""

    SCALED_ON_UNSCALED = enum.auto()
    """A scaled gradient was added to an unscaled one."""
    SCALED_AND_PLAIN = enum.auto()
    """A scaled gradient, and one of a loss that was not scaled."""
    TWO_SCALES = enum.auto()
    """Gradients that were scaled by different scales."""
    ON_USED = enum.auto()
    """A gradient was added to one that a step had used."""


@dataclass(frozen=True)
class Gradient:
    """What is known about a parameter's gradient."""

    condition: Condition = Condition.ABSENT
    line: Line = UNKNOWN
    """The call that put it into this condition."""
    mixture: Mixture | None = None
    """For a mixed gradient: what it mixes."""
    scaler: Key | None = None
    """For a scaled gradient: the scaler."""
    updates: int = 0
    """How many updates the scaler had had when it scaled the loss."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """The 16-bit dtypes of its forward passes."""
    plain_line: Line | None = None
    """A backward pass of an unscaled loss that added to it."""
    clipped_line: Line | None = None
    """Where it was clipped after the loop itself had written it: a mistake only if a scaler unscales it afterwards."""
    normalized_line: Line | None = None
    """Where the loop itself gave it a length that is free of the scale, such as 1."""
    divided_line: Line | None = None
    """Where the loop itself divided it by the scale, if it wrote nothing else into it since."""
    is_clipped: bool = False
    """Whether it was clipped before a step used it."""
    late_clip_line: Line | None = None
    """Where it was clipped only after a step had used it."""
    finite_line: Line | None = None
    """Where inf and NaN in it were replaced by numbers."""
    unsynced_line: Line | None = None
    """For a parameter of a DDP model: the last pass that added to it, if it was not summed over ranks since."""
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
            return replace(added, condition=Condition.MIXED, mixture=mixture)
        if self.condition is Condition.MIXED:  # the first mixture stays, with the line that made it
            return replace(self, dtypes=added.dtypes, plain_line=added.plain_line)
        return replace(self, line=event.line, dtypes=added.dtypes)

    def _mixture_with(self, added: Gradient) -> Mixture | None:
        """Return what the sum with another gradient mixes; None if the sum is in the condition of this gradient."""
        if self.condition is Condition.USED:
            return Mixture.ON_USED
        if self.condition is Condition.UNSCALED and added.condition is Condition.SCALED:
            return Mixture.SCALED_ON_UNSCALED
        if {self.condition, added.condition} == {Condition.PLAIN, Condition.SCALED}:
            return Mixture.SCALED_AND_PLAIN
        if self.condition is Condition.SCALED and (self.scaler, self.updates) != (added.scaler, added.updates):
            return Mixture.TWO_SCALES
        return None


@dataclass
class Scaler:
    """What is known about a `GradScaler`."""

    made_line: Line = UNKNOWN
    made_places: tuple[Place, ...] = ()
    """The places of all functions that called when it was made, the outermost first."""
    updates: int = 0
    passes: int = 0
    """The number of backward passes of losses that it scaled."""
    passes_before_update: int = 0
    """How many of them were before its last update."""
    gradients_taken: int = 0
    """How often `torch.autograd.grad` was called for a loss that it scaled."""
    steps: int = 0
    unscaled: set[Key] = field(default_factory=set)
    """The optimizers that were unscaled since the last update."""
    stepped: set[Key] = field(default_factory=set)
    """The optimizers that were stepped since the last update."""
    scale_reads: Counter[Line] = field(default_factory=Counter)
    """The lines that read its scale, and how often each did."""
    is_compared: bool = False
    """Whether its scale was read before the first backward pass: the loop compares scales to find skipped steps."""
    is_factor: bool = False
    """Whether the loop has multiplied or divided by its scale."""
    loss_lines: Counter[Line] = field(default_factory=Counter)
    """The lines that read a loss on the host that it scaled, and how often each did."""
    last_read_line: Line = UNKNOWN
    """The last line that read its scale since its last update."""
    is_saved: bool = False
    is_loaded: bool = False


class Discarded(NamedTuple):
    """A backward pass whose gradients were cleared before any step."""

    places: tuple[Place, ...]
    """Of the pass."""
    line: Line
    """Where they were cleared."""


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
    clears: int = 0
    """How often its `zero_grad` cleared gradients that no step had used."""
    window: list[Backward] = field(default_factory=list)
    """The backward passes that added to its gradients since its last step, or since they were cleared."""
    last_pass: Backward | None = None
    """The last backward pass that added to its gradients."""
    cleared_line: Line | None = None
    """Where its gradients were cleared after a backward pass, if no other pass followed."""
    loaded_line: Line | None = None
    """Where its state was loaded from a file."""
    is_restored: bool = False
    """Whether its state was loaded since its last step, from a file or from a copy."""
    stepped_line: Line | None = None
    """Where an enabled scaler has stepped it, if its gradients are those of that step."""
    discarded: list[Discarded] = field(default_factory=list)
    """The passes since its last step whose gradients were cleared before any step."""
    discards: list[int] = field(default_factory=list)
    """How many passes were discarded before each of its steps, all of them by the call that ran the last pass too."""
    applied: int = 0
    """How many of its steps were applied."""
    skips: list[StepEnded] = field(default_factory=list)
    """Its skipped steps since the last one that was applied."""
    has_own_passes: bool = False
    """Whether a backward pass reached its parameters and none of another optimizer."""

    def __str__(self) -> str:
        return self.name if self.made_line == UNKNOWN else f"{self.name}, made at {self.made_line}"


class Loop:
    """What is known about a loop. `follow` changes it to the state after an event."""

    def __init__(self) -> None:
        self.gradients: dict[Key, Gradient] = {}
        self.scalers: dict[Key, Scaler] = {}
        self.optimizers: dict[Key, Optimizer] = {}
        self.passes = 0
        self.steps = 0
        self.clears = 0
        """How often gradients were cleared that no step had used."""
        self.last_pass: Backward | None = None
        self.applied_flags: dict[Key, list[bool]] = {}
        """For each optimizer whether its steps since the last step of its scheduler were applied, one flag a step."""
        self.optimizer_saved_line: Line | None = None
        """Where an optimizer's state was last saved to a file."""
        self.has_loaded_optimizer = False
        """Whether a file was loaded that contains an optimizer's state."""
        self.has_unscaled = False
        """Whether `unscale_` was called."""
        self.is_checked = False
        """Whether something was computed from gradients since `unscale_`: the loop may look for inf itself."""
        self.has_named_overflow = False
        """Whether a rule has named what was not finite in a forward pass, and no step was applied since."""
        self.left_float16_range = False
        """Whether a float16 operation got or made a number outside of float16's range."""
        self.stale_loss_line = UNKNOWN
        """The last line that read a scaled loss after the scaler's update; `UNKNOWN` if a newer loss was read since."""
        self.scaled_reads: dict[int, Line] = {}
        """By read id: where statistics of scaled gradients were computed since the last step."""
        self.right_reads: set[int] = set()
        """The reads among them of which a number was computed that is free of the scale, or may be."""
        self.wrong_reads: set[int] = set()
        """The reads among them of which a number was used that grows with the scale."""
        self.has_scale_factor = False
        """Whether the loop has multiplied or divided by a scaler's scale since the last update."""
        self.hook_lines: set[Line] = set()
        """The lines that hooks ran which did something with gradients."""
        self.float16_lines: dict[Key, Line] = {}
        """Where each parameter was cast to float16 by `half()`."""

    def gradient(self, parameter: Key) -> Gradient:
        """Return what is known about a parameter's gradient."""
        return self.gradients.get(parameter, Gradient())

    def gradients_of(self, parameters: tuple[Key, ...]) -> list[Gradient]:
        """Return the gradients of the parameters that have one."""
        gradients = [self.gradient(parameter) for parameter in parameters]
        return [gradient for gradient in gradients if gradient.condition is not Condition.ABSENT]

    def conditions(self, parameters: tuple[Key, ...]) -> set[Condition]:
        """Return the conditions of the gradients of the parameters that have one."""
        return {gradient.condition for gradient in self.gradients_of(parameters)}

    def scaler(self, key: Key) -> Scaler:
        """Return what is known about a scaler."""
        return self.scalers.setdefault(key, Scaler())

    def optimizer(self, key: Key) -> Optimizer:
        """Return what is known about an optimizer."""
        return self.optimizers.setdefault(key, Optimizer())

    def updates_of(self, scaler: Key | None) -> int:
        """Return how many updates a scaler has had; 0 for None."""
        return 0 if scaler is None else self.scaler(scaler).updates

    @singledispatchmethod
    def follow(self, event: Event) -> None:
        """Change to the state after an event. An event without a function below changes nothing."""

    @follow.register
    def _(self, event: ScalerMade) -> None:
        self.scalers[event.scaler] = Scaler(made_line=event.line, made_places=event.places)

    @follow.register
    def _(self, event: OptimizerMade) -> None:
        self.optimizers[event.optimizer] = Optimizer(event.parameters, name=event.name, made_line=event.line)

    @follow.register
    def _(self, event: Backward) -> None:
        self.passes += 1
        self.last_pass = event
        self.has_named_overflow |= bool(event.not_finite)
        if event.scaler is not None:
            self.scaler(event.scaler).passes += 1
        updates = self.updates_of(event.scaler)
        for parameter in event.parameters:
            before = Gradient() if parameter in event.empty else self.gradient(parameter)
            after = before.after(event, updates)
            if parameter in event.unsynced:
                after = replace(after, unsynced_line=event.line)
            self.gradients[parameter] = after
        self._note_summed(event.synced)
        parameters = set(event.parameters)
        for optimizer in self.optimizers.values():
            if parameters.intersection(optimizer.parameters):
                optimizer.window.append(event)
                optimizer.last_pass = event
                optimizer.cleared_line = None
                optimizer.stepped_line = None
                optimizer.has_own_passes |= parameters.issubset(optimizer.parameters)

    @follow.register
    def _(self, event: GradientsTaken) -> None:
        if event.scaler is not None:
            self.scaler(event.scaler).gradients_taken += 1
        for optimizer in self.optimizers.values():
            optimizer.stepped_line = None
            optimizer.discarded.clear()

    @follow.register
    def _(self, event: Unscaled) -> None:
        self._forget_reads()
        self.is_checked = False
        self.has_unscaled = True
        self.optimizer(event.optimizer).parameters = event.parameters
        if event.scaler is not None and event.has_enabled_scaler:
            self.scaler(event.scaler).unscaled.add(event.optimizer)
            self._note_unscaled(event.parameters, event.line)

    @follow.register
    def _(self, event: StepCalled) -> None:
        self._forget_reads()
        self.steps += 1
        self.is_checked = False
        optimizer = self.optimizer(event.optimizer)
        optimizer.parameters = event.parameters
        optimizer.steps += 1
        optimizer.is_restored = False
        last_places = optimizer.window[-1].places if optimizer.window else ()
        is_regular = all(discarded.places == last_places for discarded in optimizer.discarded)
        optimizer.discards.append(len(optimizer.discarded) if is_regular else 0)
        optimizer.stepped_line = event.line if event.has_enabled_scaler else None
        optimizer.window = []
        for other in self.optimizers.values():
            other.discarded.clear()
        if event.scaler is not None:
            optimizer.scaler = event.scaler
            scaler = self.scaler(event.scaler)
            scaler.steps += 1
            if event.has_enabled_scaler:
                scaler.stepped.add(event.optimizer)
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            if gradient.condition is not Condition.ABSENT:
                self.gradients[parameter] = replace(gradient, condition=Condition.USED, line=event.line)

    @follow.register
    def _(self, event: StepEnded) -> None:
        self.applied_flags.setdefault(event.optimizer, []).append(event.applied)
        optimizer = self.optimizer(event.optimizer)
        if event.applied:
            optimizer.applied += 1
            optimizer.skips.clear()
            self.has_named_overflow = False
        else:
            optimizer.skips.append(event)

    @follow.register
    def _(self, event: Updated) -> None:
        scaler = self.scaler(event.scaler)
        scaler.updates += event.is_enabled
        scaler.passes_before_update = scaler.passes
        scaler.last_read_line = UNKNOWN
        self.stale_loss_line = UNKNOWN
        self.has_scale_factor = False
        scaler.unscaled.clear()
        scaler.stepped.clear()

    @follow.register
    def _(self, event: ScaleRead) -> None:
        scaler = self.scaler(event.scaler)
        scaler.is_compared |= not scaler.passes
        scaler.is_factor |= event.is_factor
        self.has_scale_factor |= event.is_factor
        scaler.scale_reads[event.line] += 1
        scaler.last_read_line = event.line

    @follow.register
    def _(self, event: ScaledLossRead) -> None:
        is_stale = event.updates != self.updates_of(event.scaler)
        self.stale_loss_line = event.line if is_stale else UNKNOWN
        if event.is_on_host:
            self.scaler(event.scaler).loss_lines[event.line] += 1

    @follow.register
    def _(self, event: GradientRead) -> None:
        if Condition.SCALED in self.conditions(event.parameters):
            self.scaled_reads[event.read_id] = event.line

    @follow.register
    def _(self, event: ReadsCancelled) -> None:
        self.is_checked = True
        self.right_reads |= self.scaled_reads.keys() & event.read_ids

    @follow.register
    def _(self, event: ReadsUsed) -> None:
        self.is_checked = True
        self.wrong_reads |= self.scaled_reads.keys() & event.read_ids

    @follow.register
    def _(self, event: GradientWritten) -> None:
        written = set(event.parameters)
        for scaler in self.scalers.values():
            scaler.is_factor |= event.divides_by_scale and scaler.last_read_line != UNKNOWN
        for optimizer in self.optimizers.values():
            if written.intersection(optimizer.parameters):
                optimizer.cleared_line = None
                optimizer.stepped_line = None
                optimizer.discarded.clear()
        if event.degree == 1:
            return
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            is_read_wrongly = not self.wrong_reads.isdisjoint(event.read_ids)  # another mistake
            if event.degree == 0 and not is_read_wrongly and not self.has_scale_factor:
                self.gradients[parameter] = replace(gradient, normalized_line=event.line)
        self._note_unscaled(event.parameters, event.line)
        for parameter in event.parameters:
            divided_line = event.line if event.divides_by_scale else None
            gradient = self.gradient(parameter)
            self.gradients[parameter] = replace(
                gradient, is_written=True, divided_line=divided_line, unsynced_line=None
            )

    @follow.register
    def _(self, event: Reduced) -> None:
        self._note_summed(event.parameters)

    @follow.register
    def _(self, event: GradientsAssigned) -> None:
        gradient = Gradient(Condition.SCALED, event.line, scaler=event.scaler, updates=self.updates_of(event.scaler))
        self.gradients |= dict.fromkeys(event.parameters, gradient)
        for optimizer in self.optimizers.values():
            optimizer.stepped_line = None
            optimizer.discarded.clear()

    @follow.register
    def _(self, event: NonfiniteReplaced) -> None:
        for parameter in event.parameters:
            self.gradients[parameter] = replace(self.gradient(parameter), finite_line=event.line)

    @follow.register
    def _(self, event: Clipped) -> None:
        is_late = self.conditions(event.parameters) == {Condition.USED}
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            if gradient.condition is not Condition.USED:
                gradient = self.gradients[parameter] = replace(gradient, is_clipped=True)
            elif is_late and not gradient.is_clipped:
                self.gradients[parameter] = replace(gradient, late_clip_line=event.line)
            if gradient.condition is Condition.UNSCALED and gradient.is_written and gradient.clipped_line is None:
                self.gradients[parameter] = replace(gradient, clipped_line=event.line)

    @follow.register
    def _(self, event: Cleared) -> None:
        if event.optimizer is not None:
            self.optimizer(event.optimizer).parameters = event.parameters
        cleared = set(event.parameters)
        self.clears += self._has_unused(event.parameters)
        affected = [optimizer for optimizer in self.optimizers.values() if cleared.intersection(optimizer.parameters)]
        unused = [optimizer for optimizer in affected if self._has_unused(optimizer.parameters)]
        for parameter in event.parameters:
            self.gradients.pop(parameter, None)
        for optimizer in affected:
            if optimizer in unused and optimizer.window:
                optimizer.discarded.append(Discarded(optimizer.window[-1].places, event.line))
            optimizer.window = []
            optimizer.stepped_line = None
        for optimizer in unused:
            if not self.gradients_of(optimizer.parameters):
                optimizer.cleared_line = event.line
        if event.optimizer is not None and self.optimizer(event.optimizer) in unused:
            self.optimizer(event.optimizer).clears += 1

    @follow.register
    def _(self, event: CastToFloat16) -> None:
        self.float16_lines |= dict.fromkeys(event.parameters, event.line)

    @follow.register
    def _(self, event: SchedulerStepped) -> None:
        self.applied_flags.pop(event.optimizer, None)

    @follow.register
    def _(self, event: ScalerSaved) -> None:
        self.scaler(event.scaler).is_saved = True

    @follow.register
    def _(self, event: ScalerLoaded) -> None:
        self.scaler(event.scaler).is_loaded = True

    @follow.register
    def _(self, event: OptimizerLoaded) -> None:
        optimizer = self.optimizer(event.optimizer)
        optimizer.is_restored = True
        if self.has_loaded_optimizer:
            optimizer.loaded_line = event.line

    @follow.register
    def _(self, event: FileSaved) -> None:
        # One that was saved before a scaler's first update, as after a training in float32, needs no scaler.
        if event.has_optimizer and any(scaler.updates for scaler in self.scalers.values()):
            self.optimizer_saved_line = event.line

    @follow.register
    def _(self, event: FileLoaded) -> None:
        self.has_loaded_optimizer |= event.has_optimizer

    @follow.register
    def _(self, event: OutOfRange) -> None:
        self.left_float16_range = True
        self.has_named_overflow |= isinstance(event, Overflowed)

    def lines_of_wrong_reads(self) -> list[Line]:
        """Return where statistics of scaled gradients were computed that are used, or for no purpose that is seen.

        If the loop has multiplied or divided by the scale, the numbers may have been unscaled on the host.
        """
        if self.has_scale_factor:
            return []
        is_right = self.right_reads - self.wrong_reads
        return [line for read_id, line in self.scaled_reads.items() if read_id not in is_right]

    def _forget_reads(self) -> None:
        self.scaled_reads.clear()
        self.right_reads.clear()
        self.wrong_reads.clear()

    def _has_unused(self, parameters: tuple[Key, ...]) -> bool:
        """Return whether a parameter has a gradient that no step has used."""
        return not self.conditions(parameters) <= {Condition.USED}

    def _note_summed(self, parameters: Iterable[Key]) -> None:
        """Note that the gradients of parameters were summed over ranks."""
        for parameter in parameters:
            if parameter in self.gradients:
                self.gradients[parameter] = replace(self.gradient(parameter), unsynced_line=None)

    def _note_unscaled(self, parameters: tuple[Key, ...], line: Line) -> None:
        """Note that the gradients of parameters were divided by the scale."""
        for parameter in parameters:
            gradient = self.gradient(parameter)
            if gradient.condition in (Condition.SCALED, Condition.PLAIN):
                self.gradients[parameter] = replace(gradient, condition=Condition.UNSCALED, line=line)
