"""Shapes in a trace that follow from values and so are not known, such as that of `x[mask]`: open shapes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from funcamp import _tree


def is_open(value: object) -> bool:
    """Return whether a value is a tensor of an open shape, or a number that follows from one."""
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_open_layout(value: object) -> bool:
    """Return whether a value is open, or a tensor whose strides follow from values, such as `x[:, mask][:, 0]`."""
    if is_open(value):
        return True
    return isinstance(value, Tensor) and any(isinstance(step, torch.SymInt) for step in value.stride())


def has_open_result(node: fx.Node) -> bool:
    """Return whether a result of a node has an open layout."""
    return any(map(has_open_layout, _tree.leaves(node.meta.get("val"))))
