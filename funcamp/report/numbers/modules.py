"""Where an operation was called: its module, and the line of the user's code.

The operations of a backward pass are called where those of the forward pass were: autograd's node of an operation has a
sequence number, by which its location is found again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.autograd.graph import Node

from funcamp.report.lines import Line, calling_line
from funcamp.report.torch_names import sequence_number


class Location(NamedTuple):
    """Where an operation was called."""

    path: str | None
    """The module; empty outside modules; None if the operation is in no differentiated pass, and not recorded."""
    line: Line | None


class Modules:
    """The modules of a run, those that run now, and where the operation of each autograd node was called.

    The first root's modules have their plain paths. A run can call several roots, for example a model and its
    criterion; the paths of the others begin with their class, `<MSELoss>`.

    Args:
        root: the first root; None for the first module that is called.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.root = root
        self.in_evaluation = False
        """Whether the outermost module that runs now is called for no gradient."""
        self._paths: dict[nn.Module, str] = {}
        if root is not None:
            self._add_paths(root, "")
        self._running: list[str | None] = []
        """The paths of the modules that run now, the outermost first; None for those that are not recorded."""
        self._locations: dict[int, Location] = {}
        """By the sequence number of an autograd node."""

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module; a module of no known root becomes the next root."""
        plain_module: nn.Module = getattr(module, "_orig_mod", module)  # without the wrapper of torch.compile
        if plain_module not in self._paths:
            prefix = ""
            if self.root is None:
                self.root = plain_module
            else:
                prefix = self._unused_prefix(type(plain_module).__name__)
            self._add_paths(plain_module, prefix)
        return self._paths[plain_module]

    def _add_paths(self, root: nn.Module, prefix: str) -> None:
        for path, module in root.named_modules():
            # The dot in front lets a path that begins with _orig_mod match too.
            plain_path = f".{path}".replace("._orig_mod", "").lstrip(".")
            self._paths.setdefault(module, ".".join(filter(None, (prefix, plain_path))))

    def _unused_prefix(self, class_name: str) -> str:
        number = sum(path.startswith(f"<{class_name}") and "." not in path for path in self._paths.values())
        return f"<{class_name} {number + 1}>" if number else f"<{class_name}>"

    def is_outside(self) -> bool:
        """Return whether no module runs now."""
        return not self._running

    def enter(self, path: str | None) -> None:
        """Note that a module begins to run: its path, or None if it is not recorded."""
        self._running.append(path)

    def leave(self) -> str | None:
        """Note that the innermost module has run; return what `enter` got."""
        path = self._running.pop()
        if not self._running:
            self.in_evaluation = False
        return path

    def locate(self, node: Node | None) -> Location:
        """Return where the operation was called that has just run, and remember it for its backward pass.

        node: autograd's current node, None in a forward pass.
        """
        if node is None:
            path = self._running[-1] if self._running else None if self.in_evaluation else ""
            location = Location(path, calling_line())
        else:
            location = self._locations.get(node._sequence_nr(), Location("", None))
            if self._running and self._running[-1] is None:
                location = location._replace(path=None)
        if location.path is not None:
            # Autograd creates the node of an operation before the operation gets here. One without a node must not
            # replace an earlier one's location.
            self._locations.setdefault(sequence_number() - 1, location)
        return location
