"""What the handlers of calls share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funcamp.report import events
from funcamp.report.autograd_graph import Scaling
from funcamp.report.events import Event, Key
from funcamp.report.hooks import ParameterHooks
from funcamp.report.lines import calling_line
from funcamp.report.nesting import Nesting
from funcamp.report.operations import Operations
from funcamp.report.replicas import Replicas
from funcamp.report.tracked import Tracked

#: After as many skipped steps in a row, the operation that makes inf or NaN is searched.
SKIPS_BEFORE_SEARCH = 7


class Run:
    """What is known about a run, for the handlers of all calls.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.nesting = Nesting()
        """What runs now."""
        self.tracked = Tracked()
        """The keys of objects, and which tensor is whose gradient."""
        self.replicas = Replicas(self.tracked)
        """The DDP models."""
        self.operations = Operations(self.emit, self.tracked, self.nesting.hides_operations)
        """The mode that gets the operations of the script's own code."""
        report_new_gradient = self.operations.report_new_gradient
        self.hooks = ParameterHooks(self.emit, self.tracked, self.nesting, report_new_gradient)
        """The hooks of parameters."""

        # The calls of scalers set these for the backward passes.
        self.has_scaled = False
        """Whether a scaler has scaled a loss."""
        self.loss_is_finite = True
        """Whether the loss was finite that a scaler scaled last."""
        self.factor_scaling: Scaling | None = None
        """The scaling of a tensor without a graph: the loop multiplies losses by it."""
        self.skips: dict[Key, int] = {}
        """For each optimizer, how many of its last steps were skipped."""

        # Backward passes set this for the calls of scalers.
        self.nonfinite_node = ""
        """The first node of the last backward pass that made inf or NaN; it is searched after several skipped steps."""

        # The calls of scalers set the first one for those that save files; those that load files set the second one.
        self.read_scales: dict[Key, float] = {}
        """The scale that each scaler's `get_scale` returned last."""
        self.loaded_numbers: set[float] = set()
        """The numbers in files that were loaded."""

    def emit(self, event: Event) -> None:
        """Report an event; the event of a hook waits for the end of its backward pass."""
        if self.nesting.in_hook:
            self.hooks.defer(event)
        else:
            self._emit(event)

    def report_replaced_gradients(self, parameters: list[Tensor]) -> None:
        """Report the gradients of parameters that the loop has replaced since the backward pass."""
        if self.nesting.in_backward:  # the pass replaces them
            return
        for key, scaling in self.tracked.assigned_gradients(parameters):
            self.emit(events.GradientsAssigned(calling_line(), (key,), scaling.scaler))
        for key, gradient in self.tracked.replaced_gradients(parameters):
            self.operations.report_new_gradient(key, gradient)
