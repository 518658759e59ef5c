"""Refuse a state or a batch that no compiled step takes, with the name of the leaf and a fix."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import one_batch
from funcamp._dtensor import is_distributed
from funcamp._trace.tensor_subclass import PLAIN_TENSORS
from funcamp._types import Tree

#: Types whose objects compare by identity but are constants anyway.
_CONSTANT_OBJECTS = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(None), type(...)),
    *(torch.dtype, torch.layout, torch.memory_format, torch.qscheme),
)


def check_state(state: Tree) -> None:
    """Raise TypeError for a leaf of a state that is neither a plain tensor nor None."""
    for index, leaf in enumerate(_tree.tensors("jit", "state", state)[0]):
        if leaf is not None and (fault := _fault(leaf)):
            raise TypeError(f"jit: state{_tree.path_of(state, index)} must be {fault}")


def _fault(leaf: Tensor) -> str | None:
    """Return what a compiled program needs a tensor to be and this one is not."""
    if is_distributed(leaf):
        return None
    if type(leaf) not in PLAIN_TENSORS:
        return (
            f"a plain tensor; got a {type(leaf).__name__}: pass the tensors it holds, or its .as_subclass(torch.Tensor)"
        )
    if leaf.is_nested or leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
        return f"a strided tensor of numbers; got {'a nested one' if leaf.is_nested else _tree.describe(leaf)}"
    return None


def check_batch(batch: Tree) -> None:
    """Raise TypeError for a leaf of a batch that is neither a plain tensor nor a constant."""
    one_batch("jit", batch)
    for index, leaf in enumerate(_tree.leaves(batch)):
        if isinstance(leaf, Tensor):
            fault = _fault(leaf) or _fault_of_attributes(leaf)
        else:
            fault = _fault_of_constant(leaf)
        if fault:
            raise TypeError(f"jit: batch{_tree.path_of(batch, index)} must be {fault}")


def _fault_of_attributes(leaf: Tensor) -> str | None:
    """Return what is wrong with a tensor of a batch that has attributes of a user's."""
    attribute = next((name for name in vars(leaf) if not name.startswith("_")), None)
    if attribute is None:
        return None
    return (
        "a tensor without attributes of its own, which a program would not see; got "
        f"{_tree.describe(leaf)} with .{attribute}: pass {attribute} as a part of the batch"
    )


def _fault_of_constant(leaf: object) -> str | None:
    """Return what a leaf that is not a tensor must be and is not: a value, of which a program has a copy."""
    if isinstance(leaf, _CONSTANT_OBJECTS):
        return None
    members = [*leaf] if isinstance(leaf, (set, frozenset)) else []
    has_tensors = _tree.tensors_in((members, getattr(leaf, "__dict__", {})))
    hash_of_class: Any = type(leaf).__hash__
    if not has_tensors and hash_of_class is not object.__hash__ and _can_be_hashed(leaf):
        return None
    return (
        "a tensor, or a constant with a hash that follows from its value and without tensors in it; got "
        f"{_tree.brief_kind(leaf)}: pass a dict of its tensors (torch.as_tensor makes one of an array), make it "
        "@dataclass(frozen=True), or register its class with torch.utils._pytree.register_pytree_node"
    )


def _can_be_hashed(leaf: object) -> bool:
    """Return whether an object can be hashed; a tuple with a list in it cannot."""
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
