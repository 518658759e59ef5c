"""Parts of a chain that clip gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.clip import check_limit, clip_grad_norm, clip_grad_value, coefficient, shortened
from funcamp._optim.part import (
    Update,
)


@dataclass(frozen=True)
class _ClipByNorm:
    max_norm: float | Tensor

    def __repr__(self) -> str:
        return f"clip_by_norm({self.max_norm})"

    def __call__(self, update: Update) -> Update:
        if update.norm is None:
            clipped_gradients, _ = clip_grad_norm(update.gradients, self.max_norm)
            return update._replace(gradients=clipped_gradients)
        factor = coefficient(self.max_norm, update.norm)
        float32_factor = _tree.settled(factor.float())

        def clip(gradient: Tensor) -> Tensor:
            is_double = gradient.dtype in (torch.float64, torch.complex128)
            return shortened(gradient, factor if is_double else float32_factor)

        flat_gradients, spec = _tree.flatten(update.gradients)
        return update._replace(gradients=_tree.map_leaves(clip, flat_gradients, spec))


def clips(part: object) -> bool:
    """Return whether a part of a chain only clips gradients."""
    return isinstance(part, (_ClipByNorm, _ClipByValue))


def clip_by_norm(max_norm: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that scales gradients so that their 2-norm is at most max_norm.

    grad = grad * min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm`. The norm is that of the gradients that the part
    gets: inside `by_group` those of its group. As the first part of a training step's chain it takes the norm that the
    step has read already, and works with slices over ranks; anywhere else it reads the gradients once more. No sync.

    Args:
        max_norm: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_norm is neither a number nor a tensor.
        ValueError: max_norm is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_norm(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, 4.0])}, clipped.init(params))[0]
        {'w': tensor([-0.6000, -0.8000])}

    References:
        `torch.nn.utils.clip_grad_norm_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_norm", "max_norm", max_norm)
    return _ClipByNorm(max_norm)


@dataclass(frozen=True)
class _ClipByValue:
    max_value: float | Tensor

    def __repr__(self) -> str:
        return f"clip_by_value({self.max_value})"

    def __call__(self, update: Update) -> Update:
        return update._replace(gradients=clip_grad_value(update.gradients, self.max_value))


def clip_by_value(max_value: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that clamps every element of the gradients to [-max_value, max_value].

    As `clip_grad_value`. No sync.

    Args:
        max_value: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_value is neither a number nor a tensor; when used: a gradient is complex.
        ValueError: max_value is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_value(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, -0.5])}, clipped.init(params))[0]
        {'w': tensor([-1.0000,  0.5000])}

    References:
        `torch.nn.utils.clip_grad_value_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_value", "max_value", max_value)
    return _ClipByValue(max_value)
