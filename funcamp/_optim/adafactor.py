"""Adafactor with its scalars as tensors; torch.optim's reads three of them on the host per step.

For a parameter p of n elements at its step t, with gradient g and learning rate lr:

    rho   = min(lr, 1 / sqrt(t))
    alpha = max(eps2, |p| / sqrt(n)) * rho
    V     = R C / mean(R), or v for a vector: running means of g^2, over rows and columns, with weight t^beta2_decay
    u     = g / sqrt(max(V, eps1^2))
    p     = p - lr * weight_decay * p - alpha / max(1, |u| / (d sqrt(n))) * u
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._scaler.torch_rule import widen


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor with its state, arguments and arithmetic: torch/optim/_adafactor.py, 2.13."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  the class's signature
        """Take one step for every parameter that has a gradient."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            rows: list[Tensor | None] = []
            columns: list[Tensor | None] = []
            variances: list[Tensor | None] = []
            steps: list[Tensor] = []
            self._init_group(group, params, grads, rows, columns, variances, steps)
            for param, grad, row, column, variance, step in zip(params, grads, rows, columns, variances, steps):
                _step(group, param, -grad if group["maximize"] else grad, row, column, variance, step)


def _step(
    group: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    variance: Tensor | None,
    step: Tensor,
) -> None:
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(param.dtype).eps
    lr, decay, root = group["lr"], group["weight_decay"], param.numel() ** 0.5
    step += 1
    count = widen(step.to(param.device))
    weight = (count ** group["beta2_decay"]).to(param.dtype)
    alpha = (widen(param.norm(2)) / root).clamp(min=eps2) * count.rsqrt().clamp(max=lr)
    if isinstance(decay, Tensor) or decay != 0:
        param.mul_(1 - lr * decay)
    if row is not None and column is not None:
        row.lerp_(torch.norm(grad, dim=-1, keepdim=True).square().div(grad.size(-1)), weight)
        column.lerp_(torch.norm(grad, dim=-2, keepdim=True).square().div(grad.size(-2)), weight)
        estimate = (row @ column) / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
    else:
        assert variance is not None
        variance.lerp_(grad * grad, weight)
        estimate = variance
    update = estimate.clamp(min=eps1 * eps1).rsqrt() * grad
    shrink = (widen(update.norm(2)) / (root * group["d"])).clamp(min=1.0)
    param.sub_(update * (alpha / shrink).to(param.dtype))
