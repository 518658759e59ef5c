"""The signature for which a step is compiled, and how two signatures differ."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import one_batch
from funcamp._dtensor import is_distributed
from funcamp._jit.constants import IndescribableError, constant_key, describe, names_key, structure_key
from funcamp._trace.open_shapes import is_open
from funcamp._types import Tree

_PLAIN = {Tensor, torch.nn.Parameter}
#: Types whose objects compare by identity but are constants anyway.
_ONE_OF_A_KIND = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(None), type(...)),
    *(torch.dtype, torch.layout, torch.memory_format, torch.qscheme),
)


@dataclass(frozen=True)
class Kind:
    """Everything about a tensor except its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {self.shape} on {self.device}"


def kinds(tree: Tree) -> Tree:
    """Return a tree with the kinds of its tensors."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([kind_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def kind_of(leaf: Tensor) -> Kind:
    """Return the kind of a tensor."""
    return Kind(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride())


def check_like(names: tuple[str, str], like: Tree, tree: Tree) -> None:
    """Raise ValueError if a tree differs from a tree of kinds in structure, shape, dtype or device."""
    _tree.same_structure("jit", names, (like, tree))
    for index, (kind, leaf) in enumerate(zip(_tree.leaves(like), _tree.leaves(tree))):
        if isinstance(kind, Kind) and isinstance(leaf, Tensor):
            found = tuple(leaf.shape), leaf.dtype, leaf.device
            fits = not is_open(leaf) and (kind.shape, kind.dtype, kind.device) == found
        else:
            fits = kind is leaf
        if not fits:
            raise ValueError(
                f"jit: {names[1]} must have the shapes, dtypes and devices of {names[0]}; at "
                f"{_tree.path_of(tree, index) or 'its only leaf'} it has {_tree.describe(leaf)} for {kind}"
            )


def flat(batch: Tree) -> tuple[Any, list[Any], Any]:
    """Return a batch as a pytree, its leaves and a key of its structure, cheap for a tuple or a dict of tensors."""
    kind = type(batch)
    if kind is tuple and {*map(type, batch)} <= _PLAIN:
        return batch, list(batch), len(batch)
    if kind is dict and {*map(type, batch.values())} <= _PLAIN:
        return batch, list(batch.values()), names_key(batch)
    leaves, spec = _tree.flatten(batch)
    if any(isinstance(leaf, Mapping) for leaf in leaves):
        return flat(_tree.plain(batch))
    return batch, leaves, structure_key(spec)


def key_of(leaf: Any) -> Any:
    """Return the key of a batch's leaf: all of a tensor but its values; else a description: 1, 1.0 and True differ."""
    kind: Any = type(leaf)
    if kind in _PLAIN:
        return leaf.shape, leaf.dtype, leaf.device, leaf.layout, Tensor, leaf.requires_grad
    if not isinstance(leaf, Tensor):
        return constant_key(leaf)
    if is_distributed(leaf):
        kind = kind, leaf.device_mesh, leaf.placements  # type: ignore[attr-defined]
    return leaf.shape, leaf.dtype, leaf.device, leaf.layout, kind, leaf.requires_grad


def check_state(state: Tree) -> None:
    """Raise TypeError for a leaf of a state that is neither a plain tensor nor None."""
    for index, leaf in enumerate(_tree.tensors("jit", "state", state)[0]):
        if leaf is not None and (fault := _fault(leaf)):
            raise TypeError(f"jit: state{_tree.path_of(state, index)} must be {fault}")


def _fault(leaf: Tensor) -> str | None:
    """Return what a compiled program needs a tensor to be and this one is not."""
    if is_distributed(leaf):
        return None
    if type(leaf) not in _PLAIN:
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
            if fault := _fault(leaf):
                raise TypeError(f"{where} {fault}")
            if attribute := next((name for name in vars(leaf) if not name.startswith("_")), None):
                raise TypeError(
                    f"{where} a tensor without attributes of its own, which a program would not see; got "
                    f"{_tree.describe(leaf)} with .{attribute}: pass {attribute} as a part of the batch"
                )
            continue
        fix = "pass a dict of its tensors, or register its class with torch.utils._pytree.register_pytree_node"
        if _holds_tensors(leaf):
            raise TypeError(
                f"{where} a tensor or a pytree of tensors; got a {type(leaf).__name__} with some in it: {fix}"
            )
        try:
            hash(leaf)
        except TypeError:
            frozen = f"make it immutable, @dataclass(frozen=True), or {fix}"
            other = (
                frozen
                if dataclasses.is_dataclass(leaf)
                else f"give it a __hash__ that follows from its value, or {fix}"
            )
            instead = "torch.as_tensor makes a tensor of an array" if hasattr(leaf, "__array__") else other
            raise TypeError(
                f"{where} a tensor, or a constant that can be hashed; got {_tree.describe(leaf)}: {instead}"
            ) from None
        hashing: Any = type(leaf).__hash__
        if hashing is object.__hash__ and not isinstance(leaf, _ONE_OF_A_KIND):
            raise TypeError(
                f"{where} a tensor, or a constant that is equal to another of its value; got a {type(leaf).__name__}, "
                f"equal only to itself, so that a program would not see later changes in it: {fix}"
            )
        try:
            describe(leaf)
        except IndescribableError as error:
            raise TypeError(
                f"{where} a tensor, or a constant that can be compared part by part; got a {type(leaf).__name__} with "
                f"{error} in it: pass a dict of what step reads"
            ) from None


def _holds_tensors(leaf: object, depth: int = 3) -> bool:
    """Return whether an object that is not a pytree has tensors in its attributes, slots or items."""
    if isinstance(leaf, _ONE_OF_A_KIND):
        return False
    names = [name for cls in type(leaf).__mro__ for name in _names(cls.__dict__.get("__slots__", ()))]
    held = [getattr(leaf, name) for name in (*names, *getattr(leaf, "__dict__", ())) if hasattr(leaf, name)]
    held += list(leaf) if isinstance(leaf, (set, frozenset)) else []
    inner = _tree.leaves(held)
    if any(isinstance(value, Tensor) for value in inner):
        return True
    return depth > 0 and any(_holds_tensors(value, depth - 1) for value in inner)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def shapes(batch: Tree) -> str:
    """Return the dtypes and shapes of a batch's first tensors as a short text."""
    leaves = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)]
    shown = [f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves]
    return ", ".join(shown[:4]) + ", ..." * (len(shown) > 4) if shown else "no tensors"


def difference(batch: Tree, before: Any, now: Any) -> str:
    """Return how a batch's signature differs from another one.

    Each has structure, leaves, autocast, default dtype and the number of the modules' training flags.
    """
    if before[0] != now[0]:
        return f"its structure changed to {_tree.flatten(batch)[1]}"
    for index, (old, new) in enumerate(zip(before[1], now[1])):
        if old != new:
            fix = f": {_CONSTANT}" if _is_number(old) and _is_number(new) else ""
            return f"batch{_tree.path_of(batch, index)} changed from {_shown(old)} to {_shown(new)}{fix}"
    if before[2] != now[2]:
        return (
            f"the autocast around the call changed from {before[2]} to {now[2]}: call it without a region, and give "
            "make_train_step a policy"
        )
    if before[3] != now[3]:
        return f"torch's default dtype changed from {before[3]} to {now[3]}"
    if before[4] != now[4]:
        return "modules changed between training and eval mode"
    return "it went back to an old one"


def _shown(leaf: tuple[Any, ...]) -> str:
    if len(leaf) > 2:
        return f"a {leaf[1]} tensor of shape {tuple(leaf[0])} on {leaf[2]}{' that requires a gradient' * leaf[5]}"
    return str(leaf[1]) if leaf[0] in (float, complex) else repr(leaf[1])


#: What to do where a number of a batch changes.
_CONSTANT = (
    "make it a tensor, torch.as_tensor(...), as a Python number is a constant of the program, and each new one "
    "compiles again"
)


def _is_number(leaf: tuple[Any, ...]) -> bool:
    """Return whether a leaf's key is that of a Python number."""
    return len(leaf) == 2 and leaf[0] in (bool, int, float, complex)


def padding(before: Any, now: Any) -> str:
    """Return what to do where shapes differ; "" where constants do."""
    changed = next((new for old, new in zip(before[1], now[1]) if old != new), ())
    constant = before[0] == now[0] and _is_number(changed)
    return "" if constant else ": pad batches to a few lengths, or raise max_signatures"
