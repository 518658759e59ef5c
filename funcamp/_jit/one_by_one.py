"""Run the operations of a program one by one, as eager code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from funcamp._jit.passes.layouts import laid_out_as, lay_out, order_of
from funcamp._trace.open_shapes import has_open_layout


def one_by_one(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs the operations one by one.

    In its first call those of another layout than in the trace are found. They are then laid out in every call.

    Args:
        module: changed in place.
    """
    is_first = True

    def call(*values: Tensor) -> Any:
        nonlocal is_first
        if not is_first:
            return module(*values)
        first = _Checked(module)
        results = first.run(*values)
        is_first = False
        for node in [node for node in module.graph.nodes if node.name in first.odd]:
            lay_out(node, order_of(node.meta["val"]))
        module.recompile()
        return results

    return call


class _Checked(fx.Interpreter):
    """Gives every result its layout in the trace, and notes the names of those that had another."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error's message stays torch's own
        self.odd: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        out, wanted = super().run_node(n), n.meta.get("val")
        if not isinstance(out, Tensor) or not isinstance(wanted, Tensor):
            return out
        if has_open_layout(wanted) or out.shape != wanted.shape:
            return out  # torch 2.11 has another shape for the gradient of the bias that an LSTM layer lacks
        laid_out = laid_out_as(out, wanted)
        if laid_out is not out:
            self.odd.add(n.name)
        return laid_out
