"""Casts of autocast inside of torch's own kernels.

A few operations have a kernel in C++ that calls other operations, which autocast casts: `nn.Bilinear`'s kernel calls
bmm. A trace records the outer operation, and the program would compute it in float32. So a trace runs such a kernel
and records what it calls.

Whether autocast is on at such an operation is known only to torch's dispatcher: torch disables it where an operation
that autocast casts calls another one (cdist its distances). A kernel for the dispatcher's autocast key is called just
then; it leaves a mark, and continues.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import enable_reentrant_dispatch

from funcamp import _upstream
from funcamp._trace.tracing import LetsDynamoIn, current
from funcamp._types import Args, Kwargs

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _upstream.find("torch.utils._python_dispatch.TorchDispatchMode")
_has_kernel = _upstream.find("torch._C._dispatch_has_kernel_for_dispatch_key")
_keys_after = _upstream.find("torch._C._dispatch_keyset_full_after")
_keys = _upstream.find("torch._C.DispatchKey")
_below_autograd = _upstream.find("torch._C._AutoDispatchBelowAutograd")
_excluded = _upstream.find("torch._C._ExcludeDispatchKeyGuard")
_key_set = _upstream.find("torch._C.DispatchKeySet")
_PRIVATE_NAMES = (_has_kernel, _keys_after, _keys, _below_autograd, _excluded, _key_set)
_aten = torch.ops.aten
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
#: How torch registers a kernel that calls other operations: its call is below autograd, unlike a CompositeImplicit one.
_KEYS_OF_CALLING_KERNELS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
#: The operations with such a kernel that autocast does not cast itself, and whose kernel calls one that it casts.
_OUTER_OPERATIONS = (
    _aten._trilinear.default,
    _aten.linalg_pinv.atol_rtol_tensor,
    _aten.affine_grid_generator.default,
    _aten._euclidean_dist.default,
)


class _Mark(threading.local):
    operation: object = None
    """The operation that this thread calls under autocast, between the dispatcher's autocast key and its modes."""


_mark = _Mark()
#: The kernels that leave the mark; they must live as long as the process.
_library: Any = None


class InnerCasts(LetsDynamoIn, TorchDispatchMode):
    """Runs the kernels that call operations which autocast casts, so that the modes below see those."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_in_kernel = False
        """Whether such a kernel is running."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        is_marked = _mark.operation is func
        if func in _OUTER_OPERATIONS and not _upstream.usable(*_PRIVATE_NAMES):
            is_marked = True  # nothing leaves a mark: raise below
        if not self._is_in_kernel and not is_marked:
            return func(*args, **kwargs)
        _mark.operation = None
        for name in _PRIVATE_NAMES:
            _upstream.check(name)
        kernel_key = _kernel_key_of(func)
        if kernel_key is None:
            return func(*args, **kwargs)
        was_in_kernel = self._is_in_kernel
        self._is_in_kernel = True
        try:
            # As in eager code: the kernel runs with the caller's autocast, and below autograd and its record of views.
            views = _key_set(_keys.ADInplaceOrView)
            with self, enable_reentrant_dispatch(), _below_autograd(), _excluded(views):
                return func._op_dk(kernel_key, *args, **kwargs)
        finally:
            self._is_in_kernel = was_in_kernel


def _kernel_key_of(func: OpOverload) -> Any:
    """Return the key of the kernel to run: that of an outer operation, or of what such a kernel calls in pieces.

    None if the operation itself is what a graph gets.
    """
    name: str = func.name()  # type: ignore[no-untyped-call]
    if func in _OUTER_OPERATIONS:
        return next(getattr(_keys, key) for key in _KEYS_OF_CALLING_KERNELS if _has_kernel(name, key))
    # Below autograd einsum arrives in one piece. One that autocast casts has been cast, and is below autocast.
    if not name.startswith("aten::") or any(_has_kernel(name, key) for key in _AUTOCAST_KEYS):
        return None
    if not _has_kernel(name, "CompositeImplicitAutograd"):
        return None
    return _keys.CompositeImplicitAutograd


def watch_autocast() -> None:
    """Let the dispatcher mark the outer operations, for this process; done once, before the first trace."""
    global _library
    if _library is not None or not _upstream.usable(*_PRIVATE_NAMES):
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for operation in _OUTER_OPERATIONS:
        for key in _AUTOCAST_KEYS:
            kernel = _make_marking_kernel(operation, getattr(_keys, key))
            _library.impl(operation, kernel, key, with_keyset=True)


def _make_marking_kernel(operation: Any, key: object) -> object:
    """Return a kernel for an autocast key that marks an operation in a trace, and calls its next kernel."""
    keys_below = _keys_after(key)

    def kernel(keys: object, *args: object, **kwargs: object) -> object:
        if current.recorder is None:
            return operation.redispatch(keys & keys_below, *args, **kwargs)
        mark_before = _mark.operation
        _mark.operation = operation
        try:
            return operation.redispatch(keys & keys_below, *args, **kwargs)
        finally:
            _mark.operation = mark_before

    return kernel
