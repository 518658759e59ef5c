"""What runs now: it decides which calls and operations are the loop's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from funcamp.report.events import Key
from funcamp.report.mode import Mode
from funcamp.report.torch_names import current_node, replaced

_T = TypeVar("_T")


class Nesting:
    """What runs now, around a call or an operation.

    Args:
        mode: gets the operations of the run; it is paused while torch's own run.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.is_quiet = False
        """Whether an observed call runs: the calls inside it are torch's, and no events."""
        self.in_backward = False
        """Whether `backward()` runs, in which DDP and FSDP write gradients."""
        self.in_hook = False
        """Whether the script's hook of a parameter runs, inside a backward pass."""
        self.in_scaler_step = False
        self.stepping: set[Key] = set()
        """The optimizers whose own `step` runs."""

    def quietly(self, function: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        """Call a function; the calls inside it are no events."""
        with replaced(self, is_quiet=True), self.mode.paused():
            return function(*args, **kwargs)

    def hides_operations(self) -> bool:
        """Return whether the operations that run now are torch's or an optimizer's, and not the loop's own."""
        if self.is_quiet or self.stepping:
            return True
        return not self.in_hook and (self.in_backward or current_node() is not None)
