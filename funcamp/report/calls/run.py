"""What the handlers of calls share: what runs now, and what is known about the run's objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from funcamp.report.autograd_graph import Scaling
from funcamp.report.events import Event, Key
from funcamp.report.float16_range import Float16Range
from funcamp.report.gradient_operations import GradientOperations
from funcamp.report.operations import Operations
from funcamp.report.torch_names import current_node, replaced
from funcamp.report.tracked import Tracked

_T = TypeVar("_T")


class Run:
    """What runs now, and what is known about the run, for the handlers of all calls.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit
        self.tracked = Tracked()
        """The keys of objects, and which tensor is whose gradient."""
        self.gradient_operations = GradientOperations(emit, self.tracked)
        self.operations = Operations(self.gradient_operations, Float16Range(emit), self._hides_operations)
        """Looks at the operations of the script's own code."""

        self.is_quiet = False
        """Whether an observed call runs: the calls inside it are torch's, and no events."""
        self.in_backward = False
        """Whether `backward()` runs, in which DDP and FSDP write gradients."""
        self.in_hook = False
        """Whether the script's hook of a parameter runs, inside a backward pass."""
        self.in_scaler_step = False
        self.stepping: set[Key] = set()
        """The optimizers whose own `step` runs."""

        # The calls of scalers set these for the backward passes.
        self.has_scaled = False
        """Whether a scaler has scaled a loss."""
        self.loss_is_finite = True
        """Whether the loss was finite that a scaler scaled last."""
        self.factor_scaling: Scaling | None = None
        """The scaling of a tensor without a graph: the loop multiplies losses by it."""
        # The calls of scalers set this for those that save files.
        self.read_scales: dict[Key, float] = {}
        """The scale that each scaler's `get_scale` returned last."""

    def quietly(self, function: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        """Call a function; the calls inside it are no events."""
        with replaced(self, is_quiet=True), self.operations.paused():
            return function(*args, **kwargs)

    def _hides_operations(self) -> bool:
        """Return whether the operations that run now are torch's or an optimizer's, and not the loop's own."""
        if self.is_quiet or self.stepping:
            return True
        return not self.in_hook and (self.in_backward or current_node() is not None)

    def report_new_gradient(self, parameter: Key, gradient: Tensor) -> None:
        """Report that the loop has replaced a parameter's gradient."""
        derived = self.tracked.derived_alone(gradient)
        self.gradient_operations.report_new_gradients((parameter,), [gradient], derived)

    def report_replaced_gradients(self, parameters: list[Tensor]) -> None:
        """Report the gradients of parameters that the loop has replaced since the backward pass."""
        if not self.in_backward:  # the pass replaces them
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
        self._quietly = run.quietly
