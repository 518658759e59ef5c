"""What is counted of a run: which operations and tensors, and the sums of their counts."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor

from funcamp.numerics.counting import has_values
from funcamp.numerics.statistics import Stats
from funcamp.report.torch_names import tree_leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload

_Key = TypeVar("_Key")

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


def nonfinite_among(arguments: object) -> tuple[bool, bool]:
    """Return whether an operation's arguments contain inf, and whether they contain NaN."""
    has_inf = has_nan = False
    for leaf in tree_leaves(arguments):
        if is_countable(leaf):
            values = leaf.float() if leaf.dtype.itemsize == 1 else leaf  # torch has no isinf of float8
            has_inf |= bool(torch.isinf(values).any())
            has_nan |= bool(torch.isnan(values).any())
        elif isinstance(leaf, float):
            has_inf |= math.isinf(leaf)
            has_nan |= math.isnan(leaf)
    return has_inf, has_nan


def add(sums: dict[_Key, Stats], key: _Key, counted: Stats) -> None:
    """Add counts to those of the same key."""
    sums[key] = sums[key] + counted if key in sums else counted
