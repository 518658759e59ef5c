"""Run the operations of a program one by one, as eager code does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from funcamp._jit.passes.layouts import laid_out_as
from funcamp._trace.open_shapes import has_open_layout
from funcamp._upstream.chains import is_view


def one_by_one(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that runs the operations one by one.

    A result that a view reads gets its layout in the trace, in which the view is possible.

    Args:
        module: changed in place.
    """
    graph = module.graph
    for node in list(graph.nodes):
        traced = node.meta.get("val")
        if node.op != "call_function" or not isinstance(traced, Tensor) or has_open_layout(traced):
            continue
        has_memory = not is_view(node) or node.target is operator.getitem  # the layout of a view follows
        if not has_memory or not any(map(is_view, node.users)):
            continue
        with graph.inserting_after(node):
            laid_out = graph.call_function(_layout_of(traced), (node,))
        node.replace_all_uses_with(laid_out, delete_user_cb=lambda user, laid_out=laid_out: user is not laid_out)
    module.recompile()
    return module


def _layout_of(traced: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gives a result its layout in the trace."""
    shape = traced.shape
    strides = traced.stride()

    def lay_out(result: Tensor) -> Tensor:
        # torch 2.11 has another shape for the gradient of the bias that an LSTM layer lacks.
        if result.stride() == strides or result.shape != shape:
            return result
        return laid_out_as(result, traced)

    return lay_out
