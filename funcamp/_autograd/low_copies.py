"""Reads of a parameter's low-precision copy outside of the layer that multiplies by it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from funcamp import _tree
from funcamp._autograd.named_storages import shares_memory
from funcamp._trace.schema import reads_no_value
from funcamp._trace.user_line import in_stack


class LowCopies(TorchFunctionMode):
    """The parameters that are passed in low precision, for a layer that autocast would cast them for.

    Other code that reads such a parameter, such as a penalty in the forward pass of a model, gets rounded values, and
    in torch's loop the full ones. Code that casts it to low precision itself gets the same.
    """

    def __init__(self, own: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._told: set[str] = set()
        for name, value in parameters.items():
            if name in own and value.dtype != own[name].dtype:
                self._note(name, value)

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return bool(self._names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        called = getattr(func, "__name__", "")
        if called in _CASTS and isinstance(out, Tensor):
            self._names.pop(id(out), None)  # a cast to the precision that it has
        if called in _PRODUCTS or called in _CASTS or reads_no_value(called):
            return out
        read = [leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor) and id(leaf) in self._names]
        for name in {self._names[id(leaf)] for leaf in read}:
            results = [leaf for leaf in _tree.leaves(out) if isinstance(leaf, Tensor)]
            if shares_memory(results, (args, kwargs)):
                for leaf in results:
                    self._note(name, leaf)
            elif name not in self._told and not _in_layer_of(name):
                self._told.add(name)
                warnings.warn(
                    f"module_loss: model reads {name!r} outside of the layer that multiplies by it, at {in_stack()}: "
                    "there a step has its low-precision copy, and torch's loop the full values: keep it, "
                    f"policy='...,keep={name}'",
                    stacklevel=2,
                )
        return out

    def _note(self, name: str, value: Tensor) -> None:
        self._names[id(value)] = name
        self._kept.append(value)  # so that no other tensor gets its id


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


def _in_layer_of(name: str) -> bool:
    """Return whether the innermost module that is being called has a parameter of this name."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            return name.rpartition(".")[2] in module._parameters
        frame = frame.f_back  # type: ignore[assignment]
    return False
