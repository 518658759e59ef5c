"""A batch norm of a transposed tensor is contiguous on a CPU, and transposed in a trace.

Whatever follows the order in memory, such as dropout's random numbers and sums, would not be that of eager code. Torch
2.11 to 2.15; https://github.com/pytorch/pytorch/issues/192668
"""

from __future__ import annotations

from typing import Any

import torch

from funcamp import _upstream
from funcamp._types import Args, Operation

_aten = torch.ops.aten
_suggest_memory_format = _upstream.find("torch._prims_common.suggest_memory_format", lambda _: torch.contiguous_format)
#: By operation the argument whose suggested memory format the first result has.
_FORMAT_GIVEN_BY: dict[Operation, int] = {
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}


def give_kernels_layouts(mode: Any) -> None:
    """Make a mode of tensors without values give results of a batch norm the layout that a CPU's kernel gives them.

    In the mode itself: torch asks for its class.
    """
    dispatch = mode.dispatch

    def dispatch_in_layout(operation: Operation, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        results = dispatch(operation, types, args, kwargs)
        if operation not in _FORMAT_GIVEN_BY or args[0].device.type != "cpu":
            return results
        memory_format = _suggest_memory_format(args[_FORMAT_GIVEN_BY[operation]])
        first, *others = results
        return (first.contiguous(memory_format=memory_format), *others)

    mode.dispatch = dispatch_in_layout
