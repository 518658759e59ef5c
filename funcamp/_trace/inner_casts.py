"""Refuse, under autocast, operations whose kernels call others that autocast casts: nn.Bilinear's calls bmm.

A trace records the outer operation, so the program would compute it in float32, and overflow at another scale than
eager code. Whether autocast is on at such an operation is known only to torch's dispatcher: torch disables it where an
operation that autocast casts calls another one (cdist its distances). A kernel for the dispatcher's autocast key is
called just then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcamp import _upstream
from funcamp._trace.tracing import HostError, current
from funcamp._trace.user_line import line_in_stack

_keys_after = _upstream.find("torch._C._dispatch_keyset_full_after")
_keys = _upstream.find("torch._C.DispatchKey")
_aten = torch.ops.aten
#: The operations that autocast does not cast itself, and whose kernel calls one that it casts.
_OUTER_OPERATIONS = {
    "nn.Bilinear": _aten._trilinear.default,
    "torch.linalg.pinv": _aten.linalg_pinv.atol_rtol_tensor,
    "affine_grid": _aten.affine_grid_generator.default,
}


@functools.cache
def watch_autocast() -> Any:
    """Let the dispatcher refuse the outer operations in a trace, for this process.

    Returns:
        What has the kernels: the cache keeps it, because they live as long.
    """
    if not _upstream.usable(_keys_after, _keys):
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, operation in _OUTER_OPERATIONS.items():
        for key in (_keys.AutocastCPU, _keys.AutocastCUDA):
            kernel = _refusing_kernel(name, operation, key)
            library.impl(operation, kernel, key.name, with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _refusing_kernel(name: str, operation: Any, key: Any) -> object:
    """Return a kernel for an autocast key that refuses an operation in a trace, and else calls its next kernel."""
    keys_below = _keys_after(key)

    def kernel(keys: Any, *args: object, **kwargs: object) -> object:
        if current.recorder is not None:
            raise HostError(
                f"not call {name} under autocast, which casts inside of its kernel, where no program does; "
                f"{line_in_stack()} does: call it in `with torch.autocast(device, enabled=False):`, with float32 inputs"
            )
        return operation.redispatch(keys & keys_below, *args, **kwargs)

    return kernel
