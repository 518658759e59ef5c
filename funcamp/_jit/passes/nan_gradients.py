"""Gradients of NaN that are NaN, so that a step finds it.

A smooth L1 loss: torch.compile's own form multiplies by the sign of the difference, and Inductor's sign of NaN is 0. A
logit with eps: its own form takes NaN for a number outside of the limits. Torch 2.11 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions

#: The number by which torch's operations mean reduction="mean".
_MEAN = 1


def _of_smooth_loss(grad_output: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Return the gradient with respect to x, as torch's kernel computes it: in float32 if x has 16 bits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    difference = x.to(dtype) - target.to(dtype)
    slope = grad_output.to(dtype)
    if reduction == _MEAN:
        slope = slope / x.numel()
    inside = slope * difference / beta
    gradient = torch.where(difference <= -beta, -slope, torch.where(difference >= beta, slope, inside))
    return gradient.to(x.dtype)


def _of_logit(grad_output: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """Return the gradient with respect to x; outside of 0 to 1 it is NaN, and outside of eps to 1 - eps 0."""
    low, outside = (0.0, torch.nan) if eps is None or eps < 0 else (eps, 0.0)
    return torch.where((x < low) | (x > 1 - low), outside, grad_output / (x * (1 - x)))


def gradients_of_nan(_: Decompositions) -> Decompositions:
    """Return the entries."""
    return {
        torch.ops.aten.smooth_l1_loss_backward.default: _of_smooth_loss,
        torch.ops.aten.logit_backward.default: _of_logit,
    }


PASS = Pass(
    name="nan_gradients",
    why="gradients of NaN are 0 in torch.compile's forms of a smooth L1 loss and a logit: a step would not be skipped",
    evidence="tests/jit/test_plain_programs.py",
    where=lambda target: target.by_inductor,
    run=lambda program: program.extended(gradients_of_nan),
    defect=True,
)
