"""`GraphPass`: a pass that Inductor runs itself, on the graph between two of its own stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from funcamp import _upstream

if TYPE_CHECKING:
    from torch import fx
    from torch._inductor.custom_graph_pass import CustomGraphPass
else:
    CustomGraphPass = _upstream.find("torch._inductor.custom_graph_pass.CustomGraphPass")


class GraphPass(CustomGraphPass):
    """A pass with a name in Inductor's cache; what derives from it changes the graph that it is called with.

    Args:
        name: the name.
    """

    def __init__(self, name: bytes) -> None:
        self._name = name

    def uuid(self) -> bytes:
        """Return the name in Inductor's cache."""
        return self._name


class Unchanged(GraphPass):
    """Only the name: Inductor's cache then finds no program that was compiled under another one."""

    def __call__(self, graph: fx.Graph) -> None:
        """Do nothing."""
