"""Check, norm, unscale and clip in two readings of the gradients: one to judge them, one inside the optimizer.

    squares   = sum over all gradients of f64(f32(g) * inv_scale)^2        one pass, one accumulator
    found_inf = 1 if squares is not finite
    norm      = sqrt(squares)
    grad      = (f32(g) * inv_scale) * f32(min(1, max_norm / (norm + 1e-6)))

In float64 the square of a finite float32 is finite and so is any sum of them, so squares is finite if and only if every
unscaled gradient is: the norm is the check. A norm beyond float32 (which torch.nn.utils.clip_grad_norm_ takes for
infinite, and multiplies every gradient by 0) still clips to max_norm here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._clip import clamp, coefficient
from funcamp._rules import widen
from funcamp._scaler import reciprocal, reduced, unscaled
from funcamp._state import ScalerState, replace
from funcamp._types import Reduce, Tree


def judge(state: ScalerState, grads: Tree, reduce: Reduce | None) -> tuple[ScalerState, Tensor]:
    """The state with its flag, and the norm of the unscaled gradients in float64, from one reading."""
    inv_scale = _tree.settled(reciprocal(state))
    sums = [_squares(unscaled(leaf, inv_scale)) for leaf in _tree.leaves(grads) if leaf is not None]
    squares = torch.stack(sums).sum() if sums else torch.zeros_like(widen(state.scale))
    flag = ((state.found_inf != 0) | ~torch.isfinite(squares)).float()
    if reduce is not None:
        flag = reduced("make_train_step", reduce, flag)
    return replace(state, found_inf=flag), squares.sqrt()


def unscale_and_clip(
    state: ScalerState, grads: Tree, norm: Tensor, max_norm: float | Tensor | None, max_value: float | Tensor | None
) -> Tree:
    """The gradients for the optimizer: a compiler computes them where they are used and writes them nowhere."""
    inv_scale = _tree.settled(reciprocal(state))
    wide = None if max_norm is None else coefficient(max_norm, norm)
    factor = None if wide is None else _tree.settled(wide.float())

    def one(leaf: Tensor) -> Tensor:
        grad = unscaled(leaf, inv_scale)
        if factor is not None and wide is not None:
            grad = grad * (wide if grad.dtype in (torch.float64, torch.complex128) else factor)
        return grad if max_value is None else clamp(grad, max_value)

    return _tree.map_leaves(one, *_tree.flatten(grads))


def _squares(leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    return widen(leaf).square().sum()
