"""What the handlers of calls share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from funcamp.report.autograd_graph import Scaling
from funcamp.report.events import Event, Key
from funcamp.report.float16_range import Float16Range
from funcamp.report.gradient_operations import GradientOperations
from funcamp.report.hooks import ParameterHooks
from funcamp.report.mode import Mode
from funcamp.report.nesting import Nesting
from funcamp.report.operations import Operations
from funcamp.report.tracked import Tracked


class Run:
    """What is known about a run, for the handlers of all calls.

    Args:
        emit: gets each event.
        mode: gets the operations of the run.
    """

    def __init__(self, emit: Callable[[Event], None], mode: Mode) -> None:
        self.emit = emit
        self.nesting = Nesting(mode)
        """What runs now."""
        self.tracked = Tracked()
        """The keys of objects, and which tensor is whose gradient."""
        self.gradient_operations = GradientOperations(self.emit, self.tracked)
        self.operations = Operations(self.gradient_operations, Float16Range(self.emit), self.nesting.hides_operations)
        """Looks at the operations of the script's own code."""
        self.hooks = ParameterHooks(self.tracked, self.nesting, self.report_new_gradient)
        """The hooks of parameters."""

        # The calls of scalers set these for the backward passes.
        self.has_scaled = False
        """Whether a scaler has scaled a loss."""
        self.loss_is_finite = True
        """Whether the loss was finite that a scaler scaled last."""
        self.factor_scaling: Scaling | None = None
        """The scaling of a tensor without a graph: the loop multiplies losses by it."""
        # The calls of scalers set the first one for those that save files; those that load files set the second one.
        self.read_scales: dict[Key, float] = {}
        """The scale that each scaler's `get_scale` returned last."""
        self.loaded_numbers: set[float] = set()
        """The numbers in files that were loaded."""

    def report_new_gradient(self, parameter: Key, gradient: Tensor) -> None:
        """Report that the loop has replaced a parameter's gradient."""
        self.gradient_operations.report_new_gradients((parameter,), self.tracked.derived_alone(gradient))

    def report_replaced_gradients(self, parameters: list[Tensor]) -> None:
        """Report the gradients of parameters that the loop has replaced since the backward pass."""
        if not self.nesting.in_backward:  # the pass replaces them
            for key, gradient in self.tracked.replaced_gradients(parameters):
                self.report_new_gradient(key, gradient)


class Calls:
    """Handles the calls of one subject.

    Args:
        run: what is known about the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._emit = run.emit
        self._tracked = run.tracked
        self._quietly = run.nesting.quietly
