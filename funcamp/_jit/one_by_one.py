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
    is_first_call = True

    def call(*values: Tensor) -> Any:
        nonlocal is_first_call
        if not is_first_call:
            return module(*values)
        interpreter = _LayoutChecker(module)
        results = interpreter.run(*values)
        is_first_call = False
        for node in list(module.graph.nodes):
            if node.name in interpreter.laid_out_nodes:
                lay_out(node, order_of(node.meta["val"]))
        module.recompile()
        return results

    return call


class _LayoutChecker(fx.Interpreter):
    """Gives every result its layout in the trace, and notes the names of those that had another."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error's message stays torch's own
        self.laid_out_nodes: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        traced = n.meta.get("val")
        if not isinstance(result, Tensor) or not isinstance(traced, Tensor):
            return result
        if has_open_layout(traced) or result.shape != traced.shape:
            return result  # torch 2.11 has another shape for the gradient of the bias that an LSTM layer lacks
        laid_out = laid_out_as(result, traced)
        if laid_out is not result:
            self.laid_out_nodes.add(n.name)
        return laid_out
