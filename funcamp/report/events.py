"""What a training loop does: one event per call. The state machine and the rules get nothing else.

A `Key` identifies an object of the run: a parameter, an optimizer or a scaler. An event does not hold the object, so
that the auditor keeps no tensor alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import dataclass_transform

from funcamp.report.lines import CallSite, Line

Key = int


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Something that a loop did. Each subclass is a frozen dataclass."""

    line: Line
    """The line of the script that made the call."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @property
    def detail(self) -> str:
        """What a finding adds about this event; empty for most events."""
        return ""


class ScalerMade(Event):
    """A `GradScaler` was made."""

    scaler: Key
    call_sites: tuple[CallSite, ...] = ()
    """Where each calling function of the user is, the outermost first."""


class OptimizerMade(Event):
    """An optimizer was made."""

    optimizer: Key
    parameters: tuple[Key, ...]
    name: str = "an optimizer"
    """Its class."""


class Backward(Event):
    """`backward()` was called, which adds to the gradients of parameters."""

    parameters: tuple[Key, ...]
    empty: frozenset[Key]
    """The parameters that had no gradient before, or zeros."""
    scaler: Key | None
    """The scaler that scaled the loss; None if no scaler did."""
    dtypes: frozenset[torch.dtype]
    """The 16-bit dtypes in which the forward pass ran."""
    is_in_autocast: bool
    """Whether it was called in an autocast region."""
    not_finite: str
    """What was not finite: "loss", in the first pass of the run also "parameter", or ""."""
    has_products: bool = True
    """Whether the forward pass multiplied matrices or convolved, which autocast runs in 16 bits."""

    @property
    def detail(self) -> str:
        """What was not finite."""
        return f"the first {self.not_finite} is not finite" if self.not_finite else ""


class GradientsTaken(Event):
    """`torch.autograd.grad` was called, whose gradients no scaler unscales: the loop does it itself."""


class OptimizerEvent(Event):
    """A call that uses the gradients of an optimizer's parameters."""

    optimizer: Key
    scaler: Key | None
    """The scaler whose method was called; None if the optimizer's own `step` was called."""
    parameters: tuple[Key, ...]
    has_enabled_scaler: bool
    """Whether a scaler was called, and it is enabled: then it divides the gradients by its scale."""


class Unscaled(OptimizerEvent):
    """`scaler.unscale_(optimizer)` was called."""


class StepCalled(OptimizerEvent):
    """`scaler.step(optimizer)` was called, or `optimizer.step()` outside of `scaler.step`."""


class StepEnded(Event):
    """`scaler.step(optimizer)`, or `optimizer.step()` outside of it, has returned."""

    optimizer: Key
    applied: bool
    """Whether the optimizer took its step; False if the scaler skipped it."""
    scale: float = 1.0
    """The scale of its gradients; 1 without a scaler."""


class Updated(Event):
    """`scaler.update()` was called."""

    scaler: Key
    is_enabled: bool


class ScaleRead(Event):
    """`scaler.get_scale()` was called."""

    scaler: Key
    is_factor: bool = False
    """Whether the script multiplies or divides by the result."""


class LossScaled(Event):
    """`scaler.scale` was called for a loss."""

    is_scaled: bool
    """Whether a scaler had scaled it before."""
    grows_with_scale: bool = False
    """Whether it is computed from gradients of a scaled loss and grows with the scale as they do."""


class HostRead(Event):
    """The loop read a number on the host."""

    scaler: Key | None
    """The scaler, if the number is a scaled loss."""


class GradientEvent(Event):
    """The loop, or a function of torch that it called, did something with gradients."""

    parameters: tuple[Key, ...]


class Clipped(GradientEvent):
    """Gradients were clipped, by a function of torch or by the loop itself."""


class GradientRead(GradientEvent):
    """A norm or another statistic of gradients was computed, which this package calls a read of the gradients."""

    read_id: int
    """A number that identifies the read in `ReadsUsed`."""


class Compared(GradientEvent):
    """Gradients, or a statistic of them, were compared with a number that grows differently with the scale."""


class ReadsUsed(Event):
    """A number that grows with the scale was read on the host."""

    read_ids: tuple[int, ...]
    """The reads of gradients from which it is computed."""


class GradientWritten(GradientEvent):
    """A gradient was multiplied, divided or replaced by the loop itself."""

    is_still_scaled: bool
    """Whether it certainly grows with the scale as before."""
    divided_line: Line | None = None
    """Where it was certainly divided by a scale."""


class NonfiniteReplaced(GradientEvent):
    """Inf and NaN in gradients were replaced by numbers."""


class Cleared(GradientEvent):
    """`zero_grad` was called, by an optimizer or a module."""

    optimizer: Key | None
    """None for a module."""


class ScalerSaved(Event):
    """`scaler.state_dict()` was called, or the scaler was pickled."""

    scaler: Key


class OptimizerLoaded(Event):
    """`optimizer.load_state_dict()` was called."""

    optimizer: Key


class FileSaved(Event):
    """`torch.save` was called."""

    has_optimizer: bool
    """Whether it contains the state of an optimizer."""


class ConstantUsed(Event):
    """A float16 operation got a Python number that is inf or zero in float16."""

    operation: str
    """Its name among torch's operators."""
    value: float

    @property
    def detail(self) -> str:
        """The operation and its number."""
        return f"{self.operation} with {self.value:g}"


class Overflowed(Event):
    """A float16 operation of the forward pass made inf or NaN of finite numbers, as a mask may be on purpose."""

    operation: str
    """Its name among torch's operators."""
    inputs: tuple[float, float]
    """The smallest and the largest of the numbers."""

    @property
    def detail(self) -> str:
        """The operation and the range of its inputs."""
        smallest, largest = self.inputs
        return f"{self.operation} of numbers from {smallest:.4g} to {largest:.4g}; float16 ends at 65504"


class Ended(Event):
    """The run ended, or the auditor has seen enough."""

    is_cut: bool = False
    """Whether more would have followed: the auditor ended the run, or an error did."""
