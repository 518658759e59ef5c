"""Make Dynamo keep an autograd.Function as one call under torch.func, so that its backward is used.

Dynamo inlines the forward of an autograd.Function unless an argument has requires_grad, which an input of
torch.func.grad does not: the custom backward is silently dropped (torch 2.11 to 2.14). Between two levels of grad the
result is zero, and under vmap it fails (2.11 to 2.15). As one call in the graph, the Function is correct in all three
cases. On torch 2.11 the same happens to the leaves of a loss that torch.autograd differentiates in the graph: Dynamo
does not see that they require a gradient (`NO_LEAVES`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest.mock import patch

import torch

from funcamp._types import Args, Kwargs
from funcamp._upstream import NO_LEAVES, transforms_active


def keep_functions_whole() -> None:
    """Let Dynamo put every autograd.Function under torch.func into its graph as one call, now and later.

    For good, because Dynamo compiles the frames after a graph break at unknown later times.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_change_dynamo)
    elif "torch._dynamo" in sys.modules:  # importing it takes seconds
        _change_dynamo()


def _change_dynamo(_: object = None) -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    variable_class: Any = AutogradFunctionVariable
    original = variable_class.call_method
    if hasattr(original, "__wrapped__"):  # it is changed already
        return

    @functools.wraps(original)
    def call_method(variable: Any, tx: object, name: str, args: Args, kwargs: Kwargs) -> object:
        has_hidden_leaves = NO_LEAVES and torch._dynamo.config.trace_autograd_ops
        if name != "apply" or not (has_hidden_leaves or transforms_active()):
            return original(variable, tx, name, args, kwargs)
        # torch puts calls of allowed callables into the graph as they are.
        is_allowed_by_torch = trace_rules.is_callable_allowed

        def is_allowed(obj: object) -> bool:
            return obj is variable.fn_cls or is_allowed_by_torch(obj)

        with patch.object(trace_rules, "is_callable_allowed", is_allowed):
            return original(variable, tx, name, args, kwargs)

    variable_class.call_method = call_method
