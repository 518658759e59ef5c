"""What an operation of a step must not do, refused where it is called: it leaves the device, or fixes a value."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Set
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._trace.schema import reads_no_value
from funcamp._trace.tracing import HostError, current
from funcamp._trace.user_line import line_in_stack
from funcamp._types import Args, Kwargs, Operation
from funcamp._upstream.fake_tensors import FakeTensor

_aten = torch.ops.aten
_COPIES_TO_A_DEVICE = {_aten._to_copy.default, _aten.copy_.default, _aten.copy.default}
#: The types of a branch or a loop body.
_FUNCTIONS = (FunctionType, MethodType, functools.partial, torch.nn.Module)


def refuse_packing(func: Operation) -> None:
    """Raise HostError for `pack_padded_sequence`: what it returns has the sequences' lengths as its shape."""
    if func is _aten._pack_padded_sequence.default:
        raise HostError(
            f"not pack sequences, whose lengths are values; {line_in_stack()} does: give the layer the padded tensor, "
            "and take the output at the end of each sequence with gather, or mask what is beyond it; a layer that "
            "reads backwards needs its sequences reversed each by itself"
        )


def refuse_waiting(func: Operation) -> None:
    """Raise HostError for a collective that waits in Python, of which a program would be empty."""
    if getattr(func, "namespace", None) == "c10d":
        raise HostError(
            f"not wait for other ranks in Python; {line_in_stack()} does: call all_reduce and so on of "
            "torch.distributed._functional_collectives, which a program contains"
        )


def refuse_draw_on_host(result: object, home: Set[str]) -> None:
    """Raise HostError if torch drew on the CPU what a CUDA graph would repeat at every replay."""
    for tensor in fake_tensors_of(result):
        device = tensor.fake_device
        if device.type not in home:
            raise HostError(
                f"draw random numbers on {_any_of(home)}, as a CUDA graph would repeat those of the host at "
                f"every step; {line_in_stack()} draws on {device.type}: pass device=, or the numbers "
                "in the batch, as tensors"
            )


def refuse_sparse(result: FakeTensor) -> None:
    """Raise HostError for a sparse tensor: of its values, a trace does not know how many there are."""
    if result.layout != torch.strided:
        raise HostError(
            f"make no sparse tensor, of which a trace does not know how many values it has; {line_in_stack()} makes "
            f"{_tree.describe(result)}: add up its entries by index_add or scatter_add, make it dense, or call the "
            "step without jit"
        )


def refuse_move(func: Operation, result: FakeTensor, args: Args, kwargs: Kwargs, home: Set[str]) -> None:
    """Raise HostError if an operation moves a tensor from home to another type of device."""
    device = result.fake_device
    if device.type in home:
        return
    # torch.func computes shapes on the meta device, but moves nothing there.
    if device.type == "meta" and func not in _COPIES_TO_A_DEVICE:
        return
    tensors = _tree.tensors_in((args, kwargs))
    if any(tensor.device.type in home for tensor in tensors):
        raise HostError(f"stay on one type of device; {line_in_stack()} moves a tensor to {device.type}")


def refuse_capture(func: Operation, tensor: Tensor, home: Set[str], *, in_cuda_graph: bool) -> None:
    """Raise HostError if a program cannot read a tensor besides its arguments.

    Args:
        func: the operation that reads it.
        tensor: the tensor.
        home: the types of device that the step must not leave.
        in_cuda_graph: whether the trace becomes a CUDA graph.
    """
    if tensor.layout != torch.strided:
        raise HostError(
            f"read strided tensors only, besides its arguments; {line_in_stack()} reads {_tree.describe(tensor)}: "
            "make it dense, or pass its indices and values as a leaf of the batch each"
        )
    is_on_host = not tensor.is_meta and tensor.device.type not in home
    if in_cuda_graph and is_on_host and not reads_no_value(func):
        raise HostError(
            f"read tensors on {_any_of(home)} only, besides its arguments, as a CUDA graph keeps the values "
            f"that the host had when it was captured; {line_in_stack()} reads {_tree.describe(tensor)}: "
            "move it before the first call, pass it in the batch, or jit with capture=False"
        )
    if tensor.is_meta and not reads_no_value(func):
        raise HostError(
            f"read tensors with values only, besides its arguments; {line_in_stack()} reads "
            f"{_tree.describe(tensor)}: give it values (to_empty, load_state_dict) before the first call. What the "
            "step itself keeps of a call has none: keep it in a buffer of the model (register_buffer). "
            "torch itself makes such a tensor for vmap(hessian(f)): take vmap(jacrev(jacrev(f)))"
        )


def refuse_branches(func: Operation, args: Args) -> None:
    """Raise HostError for torch.cond and its relatives.

    torch's own trace of a branch or a loop body would fix the values of what it reads besides its operands.
    """
    if any(isinstance(arg, _FUNCTIONS) for arg in args):
        raise HostError(
            f"not call torch.cond or a relative of it ({getattr(func, '__name__', func)}); {line_in_stack()} does: "
            "take torch.where on the results, a Python bool in the batch, or a mask of scaled_dot_product_attention"
        )


@contextlib.contextmanager
def assignments_to_data_refused() -> Iterator[None]:
    """Context manager: HostError for `tensor.data = value` in this thread's trace, since torch does not dispatch it."""
    data: Any = Tensor.data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if current.recorder is not None and value is not tensor:  # `Module.to` assigns what is there
            raise HostError(
                f"not assign to .data, which a program does not see; {line_in_stack()} does, for "
                f"{_tree.describe(tensor)}: write into it with copy_, or assign a new tensor to the name or attribute"
            )
        data.__set__(tensor, value)

    with patch.object(Tensor, "data", property(data.__get__, set_data)):
        yield


def fake_tensors_of(result: object) -> Iterable[FakeTensor]:
    """Return the tensors of the trace in what an operation returned: a tensor, or a list or tuple of some."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [value for value in results if isinstance(value, FakeTensor)]


def _any_of(devices: Set[str]) -> str:
    """Return types of device in a text."""
    return " or ".join(sorted(devices))
