"""RAdam, ASGD and Adafactor without reading a tensor on the host.

torch.optim's RAdam and ASGD branch on the step count. They have formulas without a branch for `capturable=True`, but
reject that on a CPU. Adafactor reads three of its scalars per step, on every device.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from funcamp._scaler.precision import widen


def init_group(optimizer: Any, group: dict[str, Any]) -> list[list[Any]]:
    """Create an optimizer's missing state; return the lists of parameters, gradients and state entries."""
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(optimizer._init_group).parameters)[1:]]
    optimizer._init_group(group, *lists)
    return lists


class _ByParameter:
    """Base class: a step that calls `_one` for every parameter that has a gradient."""

    def step(self: Any, closure: Any = None) -> None:  # noqa: ARG002  the class's signature
        """Take one step."""
        for group in self.param_groups:
            for tensors in zip(*init_group(self, group)):
                real = [torch.view_as_real(t) if t is not None and t.is_complex() else t for t in tensors]
                self._one(group, *real)


class RAdam(_ByParameter, torch.optim.RAdam):  # type: ignore[misc]  # a step without a closure
    """torch.optim.RAdam with its state, arguments and arithmetic: torch/optim/radam.py, PyTorch 2.13."""

    @staticmethod
    def _one(
        group: dict[str, Any], param: Tensor, grad: Tensor, average: Tensor, squares: Tensor, count: Tensor
    ) -> None:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        grad = -grad if group["maximize"] else grad
        count += 1
        if decay != 0:
            if group["decoupled_weight_decay"]:
                param.mul_(1 - lr * decay)
            else:
                grad = grad.add(param, alpha=decay)
        average.lerp_(grad, 1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = widen(count)
        remaining = 1 - beta2**step
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / remaining
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        update = average / (1 - beta1**step) * lr
        adapted = update * (remaining**0.5 / squares.sqrt().add_(group["eps"])) * rectified**0.5
        param.sub_(torch.where(length > 5.0, adapted, update))


class ASGD(_ByParameter, torch.optim.ASGD):  # type: ignore[misc]  # a step without a closure
    """torch.optim.ASGD with its state, arguments and arithmetic: torch/optim/asgd.py, PyTorch 2.13."""

    @staticmethod
    def _one(
        group: dict[str, Any], param: Tensor, grad: Tensor, mu: Tensor, average: Tensor, eta: Tensor, count: Tensor
    ) -> None:
        lr, decay, lambd = group["lr"], group["weight_decay"], group["lambd"]
        grad = -grad if group["maximize"] else grad
        count += 1
        if decay != 0:
            grad = grad.add(param, alpha=decay)
        rate = widen(eta)
        param.mul_((1 - lambd * rate).to(param.dtype))  # without the cast vmap multiplies in float64
        param.add_(grad * -rate)
        average.copy_(torch.where(mu == 1, param, average + (param - average) * mu))
        step = widen(count)
        eta.copy_(lr / (1 + lambd * lr * step) ** group["alpha"])
        mu.copy_(1 / (step - group["t0"]).clamp(min=1))


class Adafactor(_ByParameter, torch.optim.Adafactor):  # type: ignore[misc]  # a step without a closure
    """torch.optim.Adafactor with its state, arguments and arithmetic: torch/optim/_adafactor.py, PyTorch 2.13.

    For a parameter p of n elements at its step t, with gradient g and learning rate lr:

        rho   = min(lr, 1 / sqrt(t))
        alpha = max(eps2, |p| / sqrt(n)) * rho
        V     = R C / mean(R), or v for a vector: running means of g^2, over rows and columns, with weight t^beta2_decay
        u     = g / sqrt(max(V, eps1^2))
        p     = p - lr * weight_decay * p - alpha / max(1, |u| / (d sqrt(n))) * u
    """

    @staticmethod
    def _one(
        group: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        row: Tensor | None,
        column: Tensor | None,
        variance: Tensor | None,
        step: Tensor,
    ) -> None:
        eps1, eps2 = group["eps"]
        grad = -grad if group["maximize"] else grad
        if eps1 is None:
            eps1 = torch.finfo(param.dtype).eps
        lr, decay, root = group["lr"], group["weight_decay"], param.numel() ** 0.5
        step += 1
        count = widen(step.to(param.device))
        weight = (count ** group["beta2_decay"]).to(param.dtype)
        alpha = (widen(param.norm(2)) / root).clamp(min=eps2) * count.rsqrt().clamp(max=lr)
        if decay != 0:
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


#: The class that runs instead of one of torch.optim, unless with capturable=True.
BRANCHLESS: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.ASGD: ASGD,
    torch.optim.RAdam: RAdam,
    torch.optim.Adafactor: Adafactor,
}
