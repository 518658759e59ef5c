"""Refuse a state or a batch that no compiled step takes, with the name of the leaf and a fix."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import one_batch
from funcamp._dtensor import is_distributed
from funcamp._jit.signature import PLAIN
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
    if type(leaf) not in PLAIN:
        return (
            f"a plain tensor; got a {type(leaf).__name__}: pass the tensors it holds, or its .as_subclass(torch.Tensor)"
        )
    if leaf.layout != torch.strided or leaf.is_nested:
        return f"strided; got {'a nested tensor' if leaf.is_nested else f'layout {leaf.layout}'}"
    if leaf.is_quantized or leaf.is_meta:
        return f"a tensor of numbers; got a {'quantized' if leaf.is_quantized else 'meta'} one"
    return None


def check_batch(batch: Tree) -> None:
    """Raise TypeError for a leaf of a batch that is neither a plain tensor nor a possible constant."""
    one_batch("jit", batch)
    for index, leaf in enumerate(_tree.leaves(batch)):
        where = f"jit: batch{_tree.path_of(batch, index)} must be"
        if isinstance(leaf, Tensor):
            _check_tensor(where, leaf)
        else:
            _check_constant(where, leaf)


def _check_tensor(where: str, leaf: Tensor) -> None:
    """Raise TypeError for a tensor of a batch that no program takes; `where` begins the text of the error."""
    if fault := _fault(leaf):
        raise TypeError(f"{where} {fault}")
    attribute = next((name for name in vars(leaf) if not name.startswith("_")), None)
    if attribute:
        raise TypeError(
            f"{where} a tensor without attributes of its own, which a program would not see; got "
            f"{_tree.describe(leaf)} with .{attribute}: pass {attribute} as a part of the batch"
        )


def _check_constant(where: str, leaf: object) -> None:
    """Raise TypeError for a leaf that cannot be a constant; `where` begins the text of the error."""
    fix = "pass a dict of its tensors, or register its class with torch.utils._pytree.register_pytree_node"
    if isinstance(leaf, torch.Generator):
        raise TypeError(
            f"{where} a tensor or a constant; got a torch.Generator, whose state cannot be part of a program: draw "
            "from torch's default generator, or pass the numbers, as tensors"
        )
    if _holds_tensors(leaf):
        raise TypeError(f"{where} a tensor or a pytree of tensors; got a {type(leaf).__name__} with some in it: {fix}")
    try:
        hash(leaf)
    except TypeError:
        instead = _hashable_fix(leaf, fix)
        raise TypeError(
            f"{where} a tensor, or a constant that can be hashed; got {_tree.describe(leaf)}: {instead}"
        ) from None
    hashing: Any = type(leaf).__hash__
    if hashing is object.__hash__ and not isinstance(leaf, _CONSTANT_OBJECTS):
        raise TypeError(
            f"{where} a tensor, or a constant that is equal to another of its value; got a {type(leaf).__name__}, "
            f"equal only to itself, so that a program would not see later changes in it: {fix}"
        )


def _hashable_fix(leaf: object, fix: str) -> str:
    """Return what to do about a leaf that cannot be hashed."""
    if hasattr(leaf, "__array__"):
        return "torch.as_tensor makes a tensor of an array"
    if dataclasses.is_dataclass(leaf):
        return f"make it immutable, @dataclass(frozen=True), or {fix}"
    return f"give it a __hash__ that follows from its value, or {fix}"


def _holds_tensors(leaf: object) -> bool:
    """Return whether an object that is not a pytree has tensors in its attributes or among its members."""
    if isinstance(leaf, _CONSTANT_OBJECTS):
        return False
    members = [*leaf] if isinstance(leaf, (set, frozenset)) else []
    return bool(_tree.tensors_in((members, getattr(leaf, "__dict__", {}))))
