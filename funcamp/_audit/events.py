"""What a training loop does, one event a call. Rules see nothing else.

A `Key` stands for an object of the run: a parameter, an optimizer or a scaler.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from funcamp._audit.lines import Line
from funcamp._audit.proposals import Proposal, Range

Key = int


class Form(enum.Enum):
    """How a loss comes out of its last operations."""

    MEAN = enum.auto()
    """A mean over the batch, not divided further."""
    OTHER = enum.auto()
    """Anything else: a sum, a quotient, a loss of the user's own."""


@dataclass(frozen=True)
class Event:
    """Something that a loop did."""

    line: Line
    """The line that called it."""

    @property
    def detail(self) -> str:
        """What a finding adds about this event; mostly nothing."""
        return ""

    def propose(self) -> Proposal | None:
        """Return the change that holds, proven; None if there is no such proof. Runs an operation again."""
        return None


@dataclass(frozen=True)
class ScalerMade(Event):
    """A `GradScaler` was made."""

    scaler: Key


@dataclass(frozen=True)
class OptimizerMade(Event):
    """An optimizer was made."""

    optimizer: Key
    parameters: tuple[Key, ...]


@dataclass(frozen=True)
class Backward(Event):
    """`backward()` ended, which added to the gradients of parameters."""

    parameters: tuple[Key, ...]
    empty: frozenset[Key]
    """Those that had no gradient before, or zeros."""
    scaler: Key | None
    """The scaler whose `scale` made the loss; None if none did."""
    dtypes: frozenset[torch.dtype]
    """The dtypes of 16 bits in which the forward pass ran."""
    form: Form
    autocast_dtype: torch.dtype | None
    """The dtype of the autocast region that it was called in; None outside of one."""
    lines: tuple[Line, ...]
    """The lines of all calling functions, the outermost first."""
    not_finite: str
    """What was not finite in the first pass of a run before any step: "loss", "parameter" or ""."""
    retains_graph: bool = False
    """Whether it was called with `retain_graph=True`."""
    synced: frozenset[Key] = frozenset()
    """The parameters whose gradients it summed over ranks, with what they had before: those of DDP models."""
    unsynced: frozenset[Key] = frozenset()
    """Those of DDP models whose gradients it did not sum."""
    came_in: str = ""
    """Where inf or NaN came into the forward pass, if an input of an operation had it."""

    @property
    def detail(self) -> str:
        """What was not finite, and where that was first seen."""
        if not self.not_finite:
            return ""
        came_in = f"; {self.came_in}; no change of policy helps" if self.came_in else ""
        return f"the first {self.not_finite} is not finite{came_in}"


@dataclass(frozen=True)
class GradientsTaken(Event):
    """`torch.autograd.grad` was called; if a scaler scaled the loss, the loop unscales the gradients itself."""

    scaler: Key | None


@dataclass(frozen=True)
class OfOptimizer(Event):
    """A call for an optimizer's gradients."""

    optimizer: Key
    scaler: Key | None
    """The scaler that was called; None if it was the optimizer itself."""
    parameters: tuple[Key, ...]
    enabled: bool
    """Whether the scaler is enabled; False without one."""
    has_refused_float16: bool
    """Whether a gradient is float16, which the scaler refuses."""
    lines: tuple[Line, ...] = ()
    """The lines of all calling functions, the outermost first."""


@dataclass(frozen=True)
class Unscaled(OfOptimizer):
    """`scaler.unscale_(optimizer)` was called."""


@dataclass(frozen=True)
class StepCalled(OfOptimizer):
    """`scaler.step(optimizer)` was called, or `optimizer.step()` outside of it."""


@dataclass(frozen=True)
class StepEnded(Event):
    """The call of a step ended."""

    optimizer: Key
    applied: bool
    """Whether the optimizer's own step was called."""


@dataclass(frozen=True)
class Updated(Event):
    """`scaler.update()` was called."""

    scaler: Key
    sets_scale: bool
    """Whether it was given a scale."""
    enabled: bool


@dataclass(frozen=True)
class ScaleRead(Event):
    """`scaler.get_scale()` was called."""

    scaler: Key


@dataclass(frozen=True)
class ScaledLossRead(Event):
    """A scaled loss was read on the host, or divided."""

    scaler: Key
    updates: int
    """How many updates the scaler had had when it scaled the loss."""


@dataclass(frozen=True)
class OfGradients(Event):
    """Something was done with gradients."""

    parameters: tuple[Key, ...]


@dataclass(frozen=True)
class Clipped(OfGradients):
    """Gradients were clipped, by a function of torch or by the loop itself."""


@dataclass(frozen=True)
class GradientRead(OfGradients):
    """A norm or another statistic of a gradient was computed."""

    number: int
    """Of the read, by which `ReadsCancelled` and `ReadsUsed` mean it."""


@dataclass(frozen=True)
class OfReads(Event):
    """Something was done with statistics of gradients."""

    numbers: tuple[int, ...]
    """Of the reads."""


@dataclass(frozen=True)
class ReadsCancelled(OfReads):
    """A number was computed of them that does not grow with the scale, such as a cosine, or that may not."""


@dataclass(frozen=True)
class ReadsUsed(OfReads):
    """A number that grows with the scale was read on the host, or compared with one that grows otherwise."""


@dataclass(frozen=True)
class GradientWritten(OfGradients):
    """A gradient was multiplied, divided or replaced by the loop itself."""


@dataclass(frozen=True)
class Reduced(OfGradients):
    """Gradients were summed over ranks by the loop itself."""


@dataclass(frozen=True)
class Cleared(OfGradients):
    """`zero_grad` was called, by an optimizer or a module."""

    optimizer: Key | None
    """None for a module."""


@dataclass(frozen=True)
class Halved(OfGradients):
    """A module was cast to float16 by `half()`."""


@dataclass(frozen=True)
class SchedulerStepped(Event):
    """A learning-rate scheduler was stepped."""

    optimizer: Key


@dataclass(frozen=True)
class ScalerSaved(Event):
    """`scaler.state_dict()` was called, or the scaler was pickled."""

    scaler: Key


@dataclass(frozen=True)
class ScalerLoaded(Event):
    """`scaler.load_state_dict()` was called."""

    scaler: Key


@dataclass(frozen=True)
class OptimizerLoaded(Event):
    """`optimizer.load_state_dict()` was called."""

    optimizer: Key


@dataclass(frozen=True)
class FileSaved(Event):
    """`torch.save` was called."""

    has_optimizer: bool
    """Whether it contains the state of an optimizer."""


@dataclass(frozen=True)
class FileLoaded(Event):
    """`torch.load` was called."""


@dataclass(frozen=True)
class OfNumbers(Event):
    """A float16 operation met numbers that float16 does not have."""

    operation: str
    """Its name among torch's operators."""
    proposes: Callable[[], Proposal] | None = field(default=None, kw_only=True, compare=False)
    """Runs the operation again, while its inputs are as they were."""

    def propose(self) -> Proposal | None:
        """Return the smallest change with which the operation is finite, or why there is none."""
        return None if self.proposes is None else self.proposes()


@dataclass(frozen=True)
class ConstantUsed(OfNumbers):
    """A float16 operation got a number that float16 does not have."""

    value: float

    @property
    def detail(self) -> str:
        """The operation and its number."""
        return f"{self.operation} with {self.value:g}"


@dataclass(frozen=True)
class Overflowed(OfNumbers):
    """A float16 operation of the forward pass made inf or NaN of finite numbers."""

    inputs: Range
    """Of all its inputs."""
    cause: str = ""
    """What else is known of the reason."""

    @property
    def detail(self) -> str:
        """The operation and the range of its inputs."""
        return f"{self.operation} of numbers {self.inputs}; {self.cause or 'float16 ends at 65504'}"


@dataclass(frozen=True)
class Ended(Event):
    """The run ended, or the auditor has seen enough."""

    is_cut: bool = False
    """Whether more would have followed: the auditor ended the run, or an error did."""
