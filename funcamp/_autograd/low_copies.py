"""Reads of a parameter's low-precision copy outside of the layer that multiplies by it: a warning in the first call.

A step passes a parameter in low precision to a layer that autocast would cast it for. Other code that reads it, such as
a penalty in the forward pass of a model, gets rounded values, and in torch's loop the full ones. Code that casts it to
low precision itself gets the same values in both.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from funcamp._autograd.named_storages import share_memory
from funcamp._trace.schema import reads_no_value
from funcamp._trace.user_line import line_in_stack
from funcamp._tree import tensors_in
from funcamp._types import Args, Kwargs, Operation

#: Casts: what they return is in the precision that the code asks for.
_CASTS = frozenset(("to", "type", "type_as", "half", "bfloat16"))
#: Operations for which autocast casts, and functions that call them.
_PRODUCTS = frozenset(
    (
        *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "einsum"),
        *("chain_matmul", "multi_head_attention_forward", "tensordot"),
    )
)


class LowCopies(TorchFunctionMode):
    """A mode that warns of each parameter whose low-precision copy is read elsewhere.

    Args:
        own: the module's own parameters and buffers.
        parameters: the values passed as parameters.
    """

    def __init__(self, own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        """The names of the copies and of their views, by id."""
        self._references: list[Tensor] = []
        """These tensors, so that no other tensor gets their id."""
        self._warned_names: set[str] = set()
        for name, value in parameters.items():
            if name in own and value.dtype != own[name].dtype:
                self._watch(name, value)

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return bool(self._names)

    def __torch_function__(
        self, func: Operation, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        returned = func(*args, **(kwargs or {}))
        function_name = getattr(func, "__name__", "")
        if function_name in _CASTS:
            if isinstance(returned, Tensor):
                # A cast to the precision that a tensor has returns the tensor itself, now as the code asks for it.
                self._names.pop(id(returned), None)
            return returned
        if function_name in _PRODUCTS or reads_no_value(function_name):
            return returned
        arguments = tensors_in((args, kwargs))
        names_read = {self._names[id(tensor)] for tensor in arguments if id(tensor) in self._names}
        if not names_read:
            return returned
        results = tensors_in(returned)
        are_views = share_memory(results, arguments)
        for name in names_read:
            if not are_views:
                self._warn(name)
                continue
            for view in results:
                self._watch(name, view)
        return returned

    def _watch(self, name: str, value: Tensor) -> None:
        """Note that a tensor is the copy of this parameter, or a view of it."""
        self._names[id(value)] = name
        self._references.append(value)

    def _warn(self, name: str) -> None:
        """Warn once that the copy of this parameter is read, unless the layer that has the parameter reads it."""
        if name in self._warned_names or _is_in_layer_of(name):
            return
        self._warned_names.add(name)
        warnings.warn(
            f"module_loss: model reads {name!r} outside of the layer that multiplies by it, at {line_in_stack()}: "
            "there a step has its low-precision copy, and torch's loop the full values: keep it, "
            f"policy='...,keep={name}'",
            stacklevel=3,
        )


def _is_in_layer_of(name: str) -> bool:
    """Return whether the innermost module that is being called has a parameter of this name."""
    key = name.rpartition(".")[2]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            return key in module._parameters
        frame = frame.f_back
    return False
