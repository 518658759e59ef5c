"""Operations whose results have another layout in a trace than a CPU's kernel gives them.

A batch norm of a transposed tensor is contiguous, and transposed in a trace; padding by replication, and its gradient,
have the memory format of the input, and are contiguous in a trace (in 2 dimensions only the gradient). Whatever follows
the order in memory, such as dropout's random numbers and sums, would not be that of eager code, and a program that
calls the kernel would find strides that it does not expect. Torch 2.11 to 2.15;
https://github.com/pytorch/pytorch/issues/192668
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._types import Args, Operation

_aten = torch.ops.aten
_suggest_memory_format = _upstream.find("torch._prims_common.suggest_memory_format", lambda _: torch.contiguous_format)
#: By operation the argument whose suggested memory format the first result has.
_FORMAT_GIVEN_BY: dict[Operation, int] = {
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.replication_pad2d_backward.default: 1,
    _aten.replication_pad3d.default: 0,
    _aten.replication_pad3d_backward.default: 1,
}


def give_kernels_layouts(mode: Any) -> None:
    """Make a mode of tensors without values give the results of these operations the layouts of a CPU's kernels.

    In the mode itself: torch asks for its class.
    """
    dispatch = mode.dispatch

    def dispatch_in_layout(operation: Operation, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        results = dispatch(operation, types, args, kwargs)
        if operation not in _FORMAT_GIVEN_BY or args[0].device.type != "cpu":
            return results
        memory_format = _suggest_memory_format(args[_FORMAT_GIVEN_BY[operation]])
        if isinstance(results, Tensor):
            return results.contiguous(memory_format=memory_format)
        first, *others = results
        return (first.contiguous(memory_format=memory_format), *others)

    mode.dispatch = dispatch_in_layout
