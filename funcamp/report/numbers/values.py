"""Which tensors of a run are counted: the results of operations that compute, if they have values."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from funcamp import _tree
from funcamp.numerics.counting import has_values

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: Operations that create tensors, possibly with another's shape, or return their input's values. Like views and
#: `resize_`, they compute nothing.
_NOT_COMPUTED = re.compile(
    r"(new_)?(empty|zeros|ones|full|rand|randn|randint|arange|eye|scalar_tensor)(_like|_strided|_permuted)?|"
    r"(uniform|normal)_|clone|_unsafe_view"
)


def is_countable(leaf: object) -> TypeGuard[Tensor]:
    """Return whether a leaf is a tensor whose values can be counted."""
    # A subclass with a dispatch of its own (DTensor, FakeTensor) has other values, or none; a zero tangent no storage.
    if not has_values(leaf) or type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return leaf.device.type != "meta" and not leaf._is_zerotensor()


def computes(operation: OpOverload) -> bool:
    """Return whether an operation computes values: no view, no new tensor, no copy."""
    if operation.is_view or torch.Tag.inplace_view in operation.tags:
        return False
    name = operation._schema.name.split("::")[1]
    return not _NOT_COMPUTED.fullmatch(name)


def contains_nonfinite(arguments: object) -> Tensor:
    """Return whether an operation's arguments contain inf, or NaN; bool, shape (2,)."""
    contains = torch.zeros(2, dtype=torch.bool)
    for leaf in _tree.leaves(arguments):
        if is_countable(leaf):
            values = leaf.float() if leaf.dtype.itemsize == 1 else leaf  # torch has no isinf of float8
            flags = torch.stack([torch.isinf(values).any(), torch.isnan(values).any()])
            contains = contains.to(flags.device) | flags
        elif isinstance(leaf, float):
            contains = contains | torch.tensor([math.isinf(leaf), math.isnan(leaf)], device=contains.device)
    return contains


def all_finite(x: Tensor) -> bool:
    """Return on the host whether all values of a tensor are finite."""
    values = x.coalesce().values() if x.layout == torch.sparse_coo else x
    return bool(torch.isfinite(values).all())


def largest_item(x: Tensor) -> float:
    """Return the largest value of a tensor on the host."""
    return x.max().item()
