"""What runs now: it decides which calls and operations are the loop's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch.autograd.graph import Node

from funcamp import _upstream
from funcamp.report.events import Key
from funcamp._upstream.replaced import replaced

#: Returns the node of autograd that runs now; None outside of a backward pass.
current_node: Callable[[], Node | None] = _upstream.find("torch._C._current_autograd_node")

_T = TypeVar("_T")


class Nesting:
    """What runs now, around a call or an operation."""

    def __init__(self) -> None:
        _upstream.check(current_node)
        self.is_quiet = False
        """Whether an observed call runs: the calls inside it are torch's, and no events."""
        self.in_backward = False
        """Whether `backward()` runs, in which DDP and FSDP write gradients."""
        self.in_hook = False
        """Whether the script's hook of a parameter runs, inside a backward pass."""
        self.in_scaler_step = False
        self.stepping: set[Key] = set()
        """The optimizers whose own `step` runs."""
        self._threads: dict[int, bool] = {}
        """For each thread that differentiates, whether it was the first one."""

    def quietly(self, function: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        """Call a function; the calls inside it are no events."""
        with replaced(self, is_quiet=True):
            return function(*args, **kwargs)

    def hides_operations(self) -> bool:
        """Return whether the operations that run now are torch's or an optimizer's, and not the loop's own."""
        if self.is_quiet or self.stepping:
            return True
        return not self.in_hook and (self.in_backward or current_node() is not None)

    def is_in_other_loop(self, *, begins: bool = False) -> bool:
        """Return whether a second loop runs, in a thread beside that of the first one: it is not watched.

        begins: whether a loss is scaled or differentiated now, which only the thread of a loop does.
        """
        thread = threading.get_ident()
        if begins and current_node() is None:  # a backward pass has threads of its own
            self._threads.setdefault(thread, not self._threads)
        return not self._threads.get(thread, True)
