"""The state machine: what is known about a loop's gradients, optimizers and scalers after each event."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import singledispatchmethod

from funcamp.report.events import (
    Backward,
    Cleared,
    Clipped,
    ConstantUsed,
    Event,
    FileSaved,
    GradientRead,
    GradientsTaken,
    GradientWritten,
    HostRead,
    Key,
    NonfiniteReplaced,
    OptimizerLoaded,
    OptimizerMade,
    Overflowed,
    ReadsUsed,
    ScaleRead,
    ScalerMade,
    ScalerSaved,
    StepCalled,
    StepEnded,
    Unscaled,
    Updated,
)
from funcamp.report.known import Condition, Gradient, Optimizer, Scaler
from funcamp.report.lines import UNKNOWN, Line

#: A parameter has none before the first backward pass, and after it was cleared.
_NO_GRADIENT = Gradient()


class Loop:
    """What is known about a loop. `follow` changes it to the state after an event."""

    def __init__(self) -> None:
        self.gradients: dict[Key, Gradient] = {}
        self.scalers: dict[Key, Scaler] = defaultdict(Scaler)
        self.optimizers: dict[Key, Optimizer] = defaultdict(Optimizer)
        self.steps = 0
        self.clears = 0
        """How often gradients were cleared that no step had used."""
        self.last_pass: Backward | None = None
        self.optimizer_saved_line: Line | None = None
        """Where an optimizer's state was last saved to a file."""
        self.has_unscaled = False
        """Whether `unscale_` was called."""
        self.has_read_number = False
        """Whether the loop read a number on the host since `unscale_`: it may look for inf itself."""
        self.has_named_overflow = False
        """Whether a rule has named what was not finite in a forward pass, and no step was applied since."""
        self.has_used_constant = False
        """Whether a float16 operation got a number outside of float16's range."""
        self.overflow: Overflowed | None = None
        """The last float16 operation since the last backward pass that made inf or NaN."""
        self.scaled_reads: dict[int, Line] = {}
        """By read id: where statistics of scaled gradients were computed since the last backward pass."""
        self.used_reads: dict[Line, None] = {}
        """Those of them that were read on the host, in all of the run."""
        self.has_scale_factor = False
        """Whether the loop has multiplied or divided by a scaler's scale since the last update."""

    def gradient(self, parameter: Key) -> Gradient:
        """Return what is known about a parameter's gradient."""
        return self.gradients.get(parameter, _NO_GRADIENT)

    def gradients_of(self, parameters: tuple[Key, ...]) -> list[Gradient]:
        """Return the gradients of the parameters that have one."""
        gradients = [self.gradient(parameter) for parameter in parameters]
        return [gradient for gradient in gradients if gradient.condition is not Condition.ABSENT]

    def conditions(self, parameters: tuple[Key, ...]) -> set[Condition]:
        """Return the conditions of the gradients of the parameters that have one."""
        return {gradient.condition for gradient in self.gradients_of(parameters)}

    def explains(self, event: Backward) -> bool:
        """Return whether a float16 operation may have made a loss what it is, if it is not finite."""
        return event.not_finite == "loss" and (self.overflow is not None or self.has_used_constant)

    def updates_of(self, scaler: Key | None) -> int:
        """Return how many updates a scaler has had; 0 for None."""
        return 0 if scaler is None else self.scalers[scaler].updates

    @singledispatchmethod
    def follow(self, event: Event) -> None:
        """Change to the state after an event. An event without a function below changes nothing."""

    @follow.register
    def _(self, event: ScalerMade) -> None:
        self.scalers[event.scaler] = Scaler(made_line=event.line, made_at=event.call_sites)

    @follow.register
    def _(self, event: OptimizerMade) -> None:
        self.optimizers[event.optimizer] = Optimizer(event.parameters, name=event.name, made_line=event.line)

    @follow.register
    def _(self, event: Backward) -> None:
        self.has_named_overflow |= bool(event.not_finite) and (self.last_pass is None or self.explains(event))
        self.overflow = None
        self.last_pass = event
        self.scaled_reads.clear()
        if event.scaler is not None:
            self.scalers[event.scaler].passes += 1
        updates = self.updates_of(event.scaler)
        for parameter in event.parameters:
            before = _NO_GRADIENT if parameter in event.empty else self.gradient(parameter)
            after = before.after(event, updates)
            self.gradients[parameter] = after
        parameters = set(event.parameters)
        for optimizer in self.optimizers.values():
            reached = parameters.intersection(optimizer.parameters)
            if reached:
                if reached <= event.empty:  # the loop may have cleared gradients by hand
                    optimizer.window.clear()
                optimizer.window.append(event)
                optimizer.last_pass = event
                optimizer.passes += 1
                optimizer.cleared_line = None
                optimizer.stepped_line = None
                optimizer.has_own_passes |= parameters.issubset(optimizer.parameters)

    @follow.register
    def _(self, _event: GradientsTaken) -> None:
        for optimizer in self.optimizers.values():
            optimizer.stepped_line = None

    @follow.register
    def _(self, event: Unscaled) -> None:
        self.has_read_number = False
        self.has_unscaled = True
        self.optimizers[event.optimizer].parameters = event.parameters
        if event.scaler is not None and event.has_enabled_scaler:
            self.scalers[event.scaler].unscaled.add(event.optimizer)
            self._note_unscaled(event.parameters, event.line)

    @follow.register
    def _(self, event: StepCalled) -> None:
        self.steps += 1
        self.has_read_number = False
        optimizer = self.optimizers[event.optimizer]
        optimizer.parameters = event.parameters
        optimizer.steps += 1
        optimizer.empty_steps += not self.gradients_of(event.parameters)
        optimizer.is_restored = False
        optimizer.stepped_line = event.line if event.has_enabled_scaler else None
        optimizer.window = []
        if event.scaler is not None:
            optimizer.scaler = event.scaler
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            if gradient.condition is not Condition.ABSENT:
                self.gradients[parameter] = replace(gradient, condition=Condition.USED, line=event.line)

    @follow.register
    def _(self, event: StepEnded) -> None:
        optimizer = self.optimizers[event.optimizer]
        if event.applied:
            optimizer.applied += 1
            optimizer.skips.clear()
            self.has_named_overflow = False
        else:
            optimizer.skips.append(event)

    @follow.register
    def _(self, event: Updated) -> None:
        scaler = self.scalers[event.scaler]
        scaler.updates += event.is_enabled
        scaler.last_read_line = UNKNOWN
        self.has_scale_factor = False
        scaler.unscaled.clear()

    @follow.register
    def _(self, event: ScaleRead) -> None:
        scaler = self.scalers[event.scaler]
        scaler.is_factor |= event.is_factor
        self.has_scale_factor |= event.is_factor
        scaler.last_read_line = event.line

    @follow.register
    def _(self, event: HostRead) -> None:
        self.has_read_number = True
        if event.scaler is not None:
            self.scalers[event.scaler].loss_lines[event.line] += 1

    @follow.register
    def _(self, event: GradientRead) -> None:
        if Condition.SCALED in self.conditions(event.parameters):
            self.scaled_reads[event.read_id] = event.line

    @follow.register
    def _(self, event: ReadsUsed) -> None:
        used = [read_id for read_id in event.read_ids if read_id in self.scaled_reads]
        self.used_reads |= {self.scaled_reads[read_id]: None for read_id in used}

    @follow.register
    def _(self, event: GradientWritten) -> None:
        written = set(event.parameters)
        for scaler in self.scalers.values():
            scaler.is_factor |= event.divided_line is not None and scaler.last_read_line != UNKNOWN
        for optimizer in self.optimizers.values():
            if written.intersection(optimizer.parameters):
                optimizer.cleared_line = None
                optimizer.stepped_line = None
        for parameter in event.parameters:
            gradient = self.gradient(parameter)
            divided_line = gradient.divided_line if event.is_still_scaled else event.divided_line
            self.gradients[parameter] = replace(gradient, is_written=True, divided_line=divided_line)
        if not event.is_still_scaled:
            self._note_unscaled(event.parameters, event.line)

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
            is_marked = gradient.clipped_line is not None or gradient.divided_line is not None
            if gradient.condition is Condition.UNSCALED and gradient.is_written and not is_marked:
                self.gradients[parameter] = replace(gradient, clipped_line=event.line)

    @follow.register
    def _(self, event: Cleared) -> None:
        if event.optimizer is not None:
            self.optimizers[event.optimizer].parameters = event.parameters
        cleared = set(event.parameters)
        self.clears += self._has_unused(event.parameters)
        affected = [optimizer for optimizer in self.optimizers.values() if cleared.intersection(optimizer.parameters)]
        unused = [optimizer for optimizer in affected if self._has_unused(optimizer.parameters)]
        for parameter in event.parameters:
            self.gradients.pop(parameter, None)
        for optimizer in affected:
            optimizer.window = []
            optimizer.stepped_line = None
        for optimizer in unused:
            optimizer.clears += 1
            if not self.gradients_of(optimizer.parameters):
                optimizer.cleared_line = event.line

    @follow.register
    def _(self, event: ScalerSaved) -> None:
        self.scalers[event.scaler].is_saved = True

    @follow.register
    def _(self, event: OptimizerLoaded) -> None:
        self.optimizers[event.optimizer].is_restored = True

    @follow.register
    def _(self, event: FileSaved) -> None:
        # One that was saved before a scaler's first update, as after a training in float32, needs no scaler.
        if event.has_optimizer and any(scaler.updates for scaler in self.scalers.values()):
            self.optimizer_saved_line = event.line

    @follow.register
    def _(self, _event: ConstantUsed) -> None:
        self.has_used_constant = True

    @follow.register
    def _(self, event: Overflowed) -> None:
        self.overflow = event

    def _has_unused(self, parameters: tuple[Key, ...]) -> bool:
        """Return whether a parameter has a gradient that no step has used."""
        return not self.conditions(parameters) <= {Condition.USED}

    def _note_unscaled(self, parameters: tuple[Key, ...], line: Line) -> None:
        """Note that the gradients of parameters were divided by the scale."""
        for parameter in parameters:
            gradient = self.gradient(parameter)
            if gradient.condition in (Condition.SCALED, Condition.PLAIN):
                self.gradients[parameter] = replace(gradient, condition=Condition.UNSCALED, line=line)
