"""Where an operation was called: its module, and the line of the user's code.

The operations of a backward pass are called where those of the forward pass were: autograd's node of an operation has a
sequence number, by which its location is found again.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from torch.autograd.graph import Node

from funcamp import _upstream

#: Returns the sequence number of the next node that autograd creates.
sequence_number = _upstream.find("torch.autograd._get_sequence_nr")


#: The starts of the names of modules through which a script's calls go.
_WATCHERS = ("funcamp.report", "funcamp.report.numbers")


class Location(NamedTuple):
    """Where an operation was called."""

    path: str | None
    """The module; empty outside modules; None if the operation is in no differentiated pass, and not recorded."""
    line: tuple[str, int] | None
    """The file and the line."""


def innermost_user_line() -> tuple[str, int] | None:
    """Return the innermost current line outside torch and this library."""
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None  # another Python than CPython may have none
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "funcamp"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def is_called_by_library() -> bool:
    """Return whether this library made the current call, and not through its auditor or this report."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WATCHERS):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("funcamp.")


class CallSites:
    """The modules that run now, and where the operation of each autograd node was called."""

    def __init__(self) -> None:
        self.in_evaluation = False
        """Whether the outermost module that runs now is called for no gradient."""
        self._module_paths: list[str | None] = []
        """The paths of the modules that run now, the outermost first; None for those that are not recorded."""
        self._locations: dict[int, Location] = {}
        """By the sequence number of an autograd node."""

    def is_outside_modules(self) -> bool:
        """Return whether no module runs now."""
        return not self._module_paths

    def enter(self, path: str | None) -> None:
        """Note that a module begins to run: its path, or None if it is not recorded."""
        self._module_paths.append(path)

    def leave(self) -> str | None:
        """Note that the innermost module has run; return what `enter` got."""
        path = self._module_paths.pop()
        if not self._module_paths:
            self.in_evaluation = False
        return path

    def locate(self, node: Node | None) -> Location:
        """Return where the operation was called that has just run, and remember it for its backward pass.

        node: autograd's current node, None in a forward pass.
        """
        if node is None:
            location = Location(self._forward_path(), innermost_user_line())
        else:
            location = self._locations.get(node._sequence_nr(), Location("", None))
            is_in_unrecorded_module = bool(self._module_paths) and self._module_paths[-1] is None
            if is_in_unrecorded_module:
                location = location._replace(path=None)
        if location.path is not None:
            # Autograd creates the node of an operation before the operation gets here. One without a node must not
            # replace an earlier one's location.
            self._locations.setdefault(sequence_number() - 1, location)
        return location

    def _forward_path(self) -> str | None:
        """Return the path of the innermost module; None if operations are not recorded now."""
        if self._module_paths:
            return self._module_paths[-1]
        return None if self.in_evaluation else ""
