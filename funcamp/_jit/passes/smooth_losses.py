"""The gradient of a smooth L1 loss of NaN is NaN, so that a step finds it.

torch.compile's own form multiplies by the sign of the difference, and Inductor's sign of NaN is 0. Torch 2.11 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions

#: The number by which torch's operations mean reduction="mean".
_MEAN = 1


def _gradient(grad_output: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Return the gradient with respect to x, as torch's kernel computes it: in float32 if x has 16 bits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    difference = x.to(dtype) - target.to(dtype)
    slope = grad_output.to(dtype)
    if reduction == _MEAN:
        slope = slope / x.numel()
    inside = slope * difference / beta
    gradient = torch.where(difference <= -beta, -slope, torch.where(difference >= beta, slope, inside))
    return gradient.to(x.dtype)


def smooth_losses_of_nan(_: Decompositions) -> Decompositions:
    """Return the entry."""
    return {torch.ops.aten.smooth_l1_loss_backward.default: _gradient}


PASS = Pass(
    name="smooth_losses",
    why="the gradient of a smooth L1 loss of NaN is 0 in torch.compile's form, and the step would not be skipped",
    evidence="tests/jit/test_plain_programs.py",
    where=lambda target: target.by_inductor,
    run=lambda program: program.extended(smooth_losses_of_nan),
    defect=True,
)
