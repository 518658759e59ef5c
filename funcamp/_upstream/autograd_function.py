"""Keep an autograd.Function whole where Dynamo meets it under torch.func: its own backward, never its forward's.

Dynamo inlines the forward of an autograd.Function unless an argument says requires_grad, which an input of
torch.func.grad does not: the custom backward is lost without a word. Between two levels of grad it gives zeros, under
vmap it fails. Put into the graph as one call, the Function is right in each (tests/upstream/test_upstream.py tells when
this can go).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def whole_functions() -> Iterator[None]:
    """A region in which Dynamo puts every autograd.Function that it meets under torch.func into its graph."""
    if "torch._dynamo" not in sys.modules:  # an import of seconds
        yield
        return
    undo = _change()
    try:
        yield
    finally:
        undo()


def keep_functions_whole() -> None:
    """The same from here to the end of the compilation that traces this call; only to be called in one."""
    from torch._dynamo.comptime import comptime

    comptime(_until_the_end)


def _until_the_end(context: Any) -> None:
    tracer = context._ComptimeContext__tx
    undo = _change()
    if tracer.output.root_tx.one_graph:
        tracer.output.add_cleanup_hook(undo)
    # else frames after a graph break will be compiled later, nobody knows when: for good


_active = 0
_lock = threading.Lock()


def _change() -> Callable[[], None]:
    """Change Dynamo for as long as any compilation wants it; what undoes that for this one."""
    global _active
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    kind: Any = AutogradFunctionVariable
    original = getattr(kind.call_method, "original", kind.call_method)

    def undo() -> None:
        global _active
        with _lock:
            _active -= 1
            if not _active:
                kind.call_method = original

    with _lock:
        _active += 1
        kind.call_method = _keeping_whole(original)
    return undo


def _keeping_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import trace_rules

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "apply" or not torch._C._are_functorch_transforms_active():
            return original(self, tx, name, args, kwargs)
        known = trace_rules.is_callable_allowed
        with mock.patch.object(trace_rules, "is_callable_allowed", lambda obj: obj is self.fn_cls or known(obj)):
            return original(self, tx, name, args, kwargs)

    call_method.original = original  # type: ignore[attr-defined]
    return call_method
