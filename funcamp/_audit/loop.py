"""The state machine: what is known of a loop's gradients, optimizers and scalers after each event."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod

import torch

from funcamp._audit.events import (
    Backward,
    Cleared,
    Clipped,
    Event,
    FileLoaded,
    FileSaved,
    GradientRead,
    GradientsTaken,
    GradientWritten,
    Halved,
    Key,
    OfNumbers,
    OfReads,
    OptimizerLoaded,
    OptimizerMade,
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
from funcamp._audit.lines import UNKNOWN, Line


class Condition(enum.Enum):
    """What a parameter's gradient is."""

    ABSENT = enum.auto()
    """There is none, or it is zero."""
    PLAIN = enum.auto()
    """Of a loss that no scaler scaled."""
    SCALED = enum.auto()
    """Times the scale."""
    UNSCALED = enum.auto()
    """Divided by the scale, by `unscale_` or by the loop itself."""
    SPENT = enum.auto()
    """A step used it."""
    MIXED = enum.auto()
    """A sum of gradients in different conditions, which no factor can repair."""


class Mixture(enum.Enum):
    """What a mixed gradient is a sum of."""

    SCALED_ON_UNSCALED = enum.auto()
    SCALED_AND_PLAIN = enum.auto()
    TWO_SCALES = enum.auto()
    ON_SPENT = enum.auto()


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient."""

    condition: Condition = Condition.ABSENT
    line: Line = UNKNOWN
    """The call that put it into this condition."""
    mixture: Mixture | None = None
    """Of a mixed one."""
    scaler: Key | None = None
    """Of a scaled one."""
    updates: int = 0
    """How many updates the scaler had had."""
    dtypes: frozenset[torch.dtype] = frozenset()
    """The dtypes of 16 bits of its forward passes."""
    plain_line: Line | None = None
    """A backward pass without a scaler that added to it."""
    clipped: Line | None = None
    """Where it was clipped after the loop had written it, and not by then unscaled by a scaler."""
    unsynced: Line | None = None
    """The last backward pass that added to it without a sum over ranks, if it is a DDP model's and none followed."""
    is_written: bool = False
    """Whether the loop itself multiplied or replaced it: by the scale, by a number of micro-batches, or otherwise."""

    def after(self, event: Backward, updates: int) -> Gradient:
        """Return the gradient after a backward pass added to it.

        updates: how many updates the pass's scaler has had.
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
        if self.condition is Condition.MIXED:
            return replace(self, dtypes=added.dtypes, plain_line=added.plain_line)
        return replace(self, line=event.line, dtypes=added.dtypes, plain_line=self.plain_line)

    def _mixture_with(self, added: Gradient) -> Mixture | None:
        """Return what the sum with another gradient mixes; None if it is in this gradient's condition."""
        if self.condition is Condition.SPENT:
            return Mixture.ON_SPENT
        if self.condition is Condition.UNSCALED and added.condition is Condition.SCALED:
            return Mixture.SCALED_ON_UNSCALED
        if {self.condition, added.condition} == {Condition.PLAIN, Condition.SCALED}:
            return Mixture.SCALED_AND_PLAIN
        if self.condition is Condition.SCALED and (self.scaler, self.updates) != (added.scaler, added.updates):
            return Mixture.TWO_SCALES
        return None


@dataclass
class Scaler:
    """A `GradScaler`."""

    made: Line = UNKNOWN
    updates: int = 0
    passes: int = 0
    """Backward passes of losses that it scaled."""
    taken: int = 0
    """How often the loop took gradients of its losses by `torch.autograd.grad`."""
    steps: int = 0
    unscaled: set[Key] = field(default_factory=set)
    """The optimizers that were unscaled since the last update."""
    stepped: set[Key] = field(default_factory=set)
    """The optimizers that were stepped since the last update."""
    reads: Counter[Line] = field(default_factory=Counter)
    """Where its scale was read, and how often."""
    is_compared: bool = False
    """Whether it was read before the first pass: a loop that keeps it finds skipped steps by it."""
    last_read: Line = UNKNOWN
    """Where its scale was read last since its last update."""
    is_saved: bool = False
    is_loaded: bool = False


@dataclass
class Optimizer:
    """An optimizer."""

    parameters: tuple[Key, ...] = ()
    scaler: Key | None = None
    """The scaler that stepped it last."""
    steps: int = 0
    clears: int = 0
    """How often it cleared gradients that no step had used."""
    window: list[Backward] = field(default_factory=list)
    """The backward passes that reached it since its last step, or since its gradients were cleared."""
    last_pass: Backward | None = None
    """The last backward pass that reached it."""
    cleared: Line | None = None
    """Where its gradients were cleared after a backward pass, if none followed."""
    loaded: Line | None = None
    """Where its state was loaded from a file."""


class Loop:
    """What is known of a loop. `follow` takes it to the state after an event."""

    def __init__(self) -> None:
        self.gradients: dict[Key, Gradient] = {}
        self.scalers: dict[Key, Scaler] = {}
        self.optimizers: dict[Key, Optimizer] = {}
        self.passes = 0
        self.steps = 0
        self.clears = 0
        """How often gradients were cleared that no step had used."""
        self.last_pass: Backward | None = None
        self.outcomes: dict[Key, list[bool]] = {}
        """For each optimizer whether its steps since the last call of a scheduler were applied."""
        self.optimizer_saved: Line | None = None
        """Where the state of an optimizer was saved to a file."""
        self.has_loaded_file = False
        self.has_overflowed = False
        """Whether float16 made inf or NaN in a forward pass."""
        self.stale_loss_read = UNKNOWN
        """Where a scaled loss was read last whose scaler had been updated since."""
        self.scaled_reads: dict[int, Line] = {}
        """Where statistics of scaled gradients were computed, and it is not known yet what becomes of them."""
        self.halved: dict[Key, Line] = {}
        """Where parameters were cast to float16."""

    def gradient(self, parameter: Key) -> Gradient:
        """Return a parameter's gradient."""
        return self.gradients.get(parameter, Gradient())

    def present(self, parameters: tuple[Key, ...]) -> list[Gradient]:
        """Return the gradients of parameters that have one."""
        gradients = [self.gradient(parameter) for parameter in parameters]
        return [gradient for gradient in gradients if gradient.condition is not Condition.ABSENT]

    def conditions(self, parameters: tuple[Key, ...]) -> set[Condition]:
        """Return the conditions of the gradients of parameters that have one."""
        return {gradient.condition for gradient in self.present(parameters)}

    def scaler(self, key: Key) -> Scaler:
        """Return a scaler."""
        return self.scalers.setdefault(key, Scaler())

    def optimizer(self, key: Key) -> Optimizer:
        """Return an optimizer."""
        return self.optimizers.setdefault(key, Optimizer())

    def updates_of(self, scaler: Key | None) -> int:
        """Return how many updates a scaler has had; 0 for None."""
        return 0 if scaler is None else self.scaler(scaler).updates

    @singledispatchmethod
    def follow(self, event: Event) -> None:
        """Take the state after an event. Most events change nothing."""

    @follow.register
    def _(self, event: ScalerMade) -> None:
        self.scalers[event.scaler] = Scaler(made=event.line)

    @follow.register
    def _(self, event: OptimizerMade) -> None:
        self.optimizers[event.optimizer] = Optimizer(event.parameters)

    @follow.register
    def _(self, event: Backward) -> None:
        self.passes += 1
        self.last_pass = event
        if event.scaler is not None:
            self.scaler(event.scaler).passes += 1
        updates = self.updates_of(event.scaler)
        for parameter in event.parameters:
            before = Gradient() if parameter in event.empty else self.gradient(parameter)
            after = before.after(event, updates)
            self.gradients[parameter] = replace(after, unsynced=event.line) if parameter in event.unsynced else after
        self._sync(event.synced)
        reached = set(event.parameters)
        for optimizer in self.optimizers.values():
            if reached.intersection(optimizer.parameters):
                optimizer.window.append(event)
                optimizer.last_pass = event
                optimizer.cleared = None

    @follow.register
    def _(self, event: GradientsTaken) -> None:
        if event.scaler is not None:
            self.scaler(event.scaler).taken += 1

    @follow.register
    def _(self, event: Unscaled) -> None:
        self.scaled_reads.clear()
        self.optimizer(event.optimizer).parameters = event.parameters
        if event.scaler is not None and event.enabled:
            self.scaler(event.scaler).unscaled.add(event.optimizer)
            self._unscale(event.parameters, event.line)

    @follow.register
    def _(self, event: StepCalled) -> None:
        self.scaled_reads.clear()
        self.steps += 1
        optimizer = self.optimizer(event.optimizer)
        optimizer.parameters = event.parameters
        optimizer.steps += 1
        optimizer.window = []
        if event.scaler is not None:
            optimizer.scaler = event.scaler
            scaler = self.scaler(event.scaler)
            scaler.steps += 1
            if event.enabled:
                scaler.stepped.add(event.optimizer)
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            if gradient.condition is not Condition.ABSENT:
                self.gradients[parameter] = replace(gradient, condition=Condition.SPENT, line=event.line)

    @follow.register
    def _(self, event: StepEnded) -> None:
        self.outcomes.setdefault(event.optimizer, []).append(event.applied)

    @follow.register
    def _(self, event: Updated) -> None:
        scaler = self.scaler(event.scaler)
        scaler.updates += event.enabled
        scaler.last_read = UNKNOWN
        self.stale_loss_read = UNKNOWN
        scaler.unscaled.clear()
        scaler.stepped.clear()

    @follow.register
    def _(self, event: ScaleRead) -> None:
        scaler = self.scaler(event.scaler)
        scaler.is_compared |= not scaler.passes
        scaler.reads[event.line] += 1
        scaler.last_read = event.line

    @follow.register
    def _(self, event: ScaledLossRead) -> None:
        is_stale = event.updates != self.updates_of(event.scaler)
        self.stale_loss_read = event.line if is_stale else UNKNOWN

    @follow.register
    def _(self, event: GradientRead) -> None:
        if Condition.SCALED in self.conditions(event.parameters):
            self.scaled_reads[event.number] = event.line

    @follow.register
    def _(self, event: OfReads) -> None:
        for number in event.numbers:
            self.scaled_reads.pop(number, None)

    @follow.register
    def _(self, event: GradientWritten) -> None:
        self._unscale(event.parameters, event.line)
        for parameter in event.parameters:
            self.gradients[parameter] = replace(self.gradient(parameter), is_written=True, unsynced=None)

    @follow.register
    def _(self, event: Reduced) -> None:
        self._sync(event.parameters)

    @follow.register
    def _(self, event: Clipped) -> None:
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            if gradient.condition is Condition.UNSCALED and gradient.is_written and gradient.clipped is None:
                self.gradients[parameter] = replace(gradient, clipped=event.line)

    @follow.register
    def _(self, event: Cleared) -> None:
        if event.optimizer is not None:
            self.optimizer(event.optimizer).parameters = event.parameters
        cleared = set(event.parameters)
        self.clears += bool(self.conditions(event.parameters) - {Condition.SPENT})
        for key, optimizer in self.optimizers.items():
            unspent = self.conditions(optimizer.parameters) - {Condition.SPENT}
            if unspent and cleared.issuperset(optimizer.parameters):
                optimizer.cleared = event.line
                optimizer.clears += key == event.optimizer
            if cleared.intersection(optimizer.parameters):
                optimizer.window = []
        for parameter in event.parameters:
            self.gradients.pop(parameter, None)

    @follow.register
    def _(self, event: Halved) -> None:
        self.halved |= dict.fromkeys(event.parameters, event.line)

    @follow.register
    def _(self, event: SchedulerStepped) -> None:
        self.outcomes.pop(event.optimizer, None)

    @follow.register
    def _(self, event: ScalerSaved) -> None:
        self.scaler(event.scaler).is_saved = True

    @follow.register
    def _(self, event: ScalerLoaded) -> None:
        self.scaler(event.scaler).is_loaded = True

    @follow.register
    def _(self, event: OptimizerLoaded) -> None:
        if self.has_loaded_file:
            self.optimizer(event.optimizer).loaded = event.line

    @follow.register
    def _(self, event: FileSaved) -> None:
        if event.has_optimizer:
            self.optimizer_saved = event.line

    @follow.register
    def _(self, _event: FileLoaded) -> None:
        self.has_loaded_file = True

    @follow.register
    def _(self, _event: OfNumbers) -> None:
        self.has_overflowed = True

    def _sync(self, parameters: Iterable[Key]) -> None:
        """Sum the gradients of parameters over ranks."""
        for parameter in parameters:
            if parameter in self.gradients:
                self.gradients[parameter] = replace(self.gradient(parameter), unsynced=None)

    def _unscale(self, parameters: tuple[Key, ...], line: Line) -> None:
        """Divide the gradients of parameters by the scale."""
        for parameter in parameters:
            gradient = self.gradient(parameter)
            if gradient.condition in (Condition.SCALED, Condition.PLAIN):
                self.gradients[parameter] = replace(gradient, condition=Condition.UNSCALED, line=line)
