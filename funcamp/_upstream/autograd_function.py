"""Make Dynamo keep an autograd.Function as one call under torch.func, so that its backward is used.

Dynamo inlines the forward of an autograd.Function unless an argument has requires_grad, which an input of
torch.func.grad does not: the custom backward is silently dropped. Between two levels of grad the result is zero, and
under vmap it fails. As one call in the graph, the Function is correct in all three cases
(tests/upstream/test_upstream.py fails when this is no longer needed). On torch 2.11 the same happens to the leaves of a
loss that torch.autograd differentiates in the graph: Dynamo does not see that they require a gradient (`NO_LEAVES`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from funcamp._types import Args, Kwargs
from funcamp._upstream import LOST_BACKWARD, LOST_NESTED_BACKWARD, NO_LEAVES, REFUSED_UNDER_VMAP
from funcamp._upstream.replaced import replaced

_DEFECTS = (LOST_BACKWARD, LOST_NESTED_BACKWARD, NO_LEAVES, REFUSED_UNDER_VMAP)
_IS_NEEDED = any(defect.present for defect in _DEFECTS)


@contextlib.contextmanager
def whole_functions() -> Iterator[None]:
    """Context manager: Dynamo puts every autograd.Function under torch.func into its graph as one call."""
    if not _IS_NEEDED or "torch._dynamo" not in sys.modules:  # not imported, because that takes seconds
        yield
        return
    undo = _change_dynamo()
    try:
        yield
    finally:
        undo()


def keep_functions_whole() -> None:
    """Do the same until the end of the compilation that traces this call; call it only inside one."""
    if not _IS_NEEDED:
        return
    from torch._dynamo.comptime import comptime

    comptime(_until_the_end)


def _until_the_end(context: Any) -> None:
    tracer = context._ComptimeContext__tx
    undo = _change_dynamo()
    if tracer.output.root_tx.one_graph:
        tracer.output.add_cleanup_hook(undo)
    # else frames after a graph break are compiled at unknown later times: keep it for good


#: The number of compilations that need the change now, in all threads.
_compilations = 0
_lock = threading.Lock()


def _change_dynamo() -> Callable[[], None]:
    """Change Dynamo while any compilation needs it; return the function that undoes it for this one."""
    global _compilations
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    variable_class: Any = AutogradFunctionVariable
    original = getattr(variable_class.call_method, "original", variable_class.call_method)

    def undo() -> None:
        global _compilations
        with _lock:
            _compilations -= 1
            if not _compilations:
                variable_class.call_method = original

    with _lock:
        _compilations += 1
        variable_class.call_method = _make_call_method(original)
    return undo


def _make_call_method(original: Callable[..., Any]) -> Callable[..., object]:
    """Return a method that makes one call of `apply` of an autograd.Function, where torch's own would inline it."""
    from torch._dynamo import trace_rules

    def call_method(self: Any, tx: object, name: str, args: Args, kwargs: Kwargs) -> object:
        hidden_leaves = NO_LEAVES.present and torch._dynamo.config.trace_autograd_ops
        if name != "apply" or not (hidden_leaves or torch._C._are_functorch_transforms_active()):
            return original(self, tx, name, args, kwargs)
        # torch puts calls of allowed callables into the graph as they are.
        is_allowed_by_torch = trace_rules.is_callable_allowed
        with replaced(trace_rules, is_callable_allowed=lambda obj: obj is self.fn_cls or is_allowed_by_torch(obj)):
            return original(self, tx, name, args, kwargs)

    call_method.original = original  # type: ignore[attr-defined]
    return call_method
