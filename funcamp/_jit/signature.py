"""The signature for which a step is compiled, and how two signatures differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import is_distributed
from funcamp._jit.constants import constant_key, names_key, structure_key
from funcamp._types import Tree

_PLAIN = {Tensor, torch.nn.Parameter}


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
