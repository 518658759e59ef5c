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
    # `_init_group` appends to lists that it gets after the group; a class has as many as it needs.
    _, *list_names = inspect.signature(optimizer._init_group).parameters
    lists: list[list[Any]] = [[] for _ in list_names]
    optimizer._init_group(group, *lists)
    return lists


class _ByParameter:
    """Base class: a step that calls `_step_parameter` for every parameter that has a gradient.

    A complex tensor is passed as real numbers, as in torch's classes.
    """

    def step(self: Any, closure: Any = None) -> None:  # noqa: ARG002  the class's signature
        """Take one step."""
        for group in self.param_groups:
            for tensors in zip(*init_group(self, group)):
                self._step_parameter(group, *map(_as_real, tensors))


def _as_real(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor)


class RAdam(_ByParameter, torch.optim.RAdam):  # type: ignore[misc]  # a step without a closure
    """torch.optim.RAdam with its state, arguments and arithmetic: torch/optim/radam.py, PyTorch 2.13."""

    @staticmethod
    def _step_parameter(
        group: dict[str, Any], param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
    ) -> None:
        lr = group["lr"]
        weight_decay = group["weight_decay"]
        beta1, beta2 = group["betas"]
        grad = -grad if group["maximize"] else grad
        step += 1
        if weight_decay != 0:
            if group["decoupled_weight_decay"]:
                param.mul_(1 - lr * weight_decay)
            else:
                grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        count = widen(step)
        bias_correction1 = 1 - beta1**count
        bias_correction2 = 1 - beta2**count
        # rho is the length of the approximated simple moving average, in the names of torch's documentation.
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * count * beta2**count / bias_correction2
        rectification = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        update = exp_avg / bias_correction1 * lr
        adapted = update * (bias_correction2**0.5 / exp_avg_sq.sqrt().add_(group["eps"])) * rectification**0.5
        param.sub_(torch.where(rho > 5.0, adapted, update))


class ASGD(_ByParameter, torch.optim.ASGD):  # type: ignore[misc]  # a step without a closure
    """torch.optim.ASGD with its state, arguments and arithmetic: torch/optim/asgd.py, PyTorch 2.13."""

    @staticmethod
    def _step_parameter(
        group: dict[str, Any], param: Tensor, grad: Tensor, mu: Tensor, average: Tensor, eta: Tensor, step: Tensor
    ) -> None:
        lr = group["lr"]
        weight_decay = group["weight_decay"]
        lambd = group["lambd"]
        grad = -grad if group["maximize"] else grad
        step += 1
        if weight_decay != 0:
            grad = grad.add(param, alpha=weight_decay)
        wide_eta = widen(eta)
        param.mul_((1 - lambd * wide_eta).to(param.dtype))  # without the cast vmap multiplies in float64
        param.add_(grad * -wide_eta)
        average.copy_(torch.where(mu == 1, param, average + (param - average) * mu))
        # For the next step.
        count = widen(step)
        eta.copy_(lr / (1 + lambd * lr * count) ** group["alpha"])
        mu.copy_(1 / (count - group["t0"]).clamp(min=1))


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
    def _step_parameter(
        group: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        row_var: Tensor | None,
        col_var: Tensor | None,
        variance: Tensor | None,
        step: Tensor,
    ) -> None:
        lr = group["lr"]
        weight_decay = group["weight_decay"]
        eps1, eps2 = group["eps"]
        if eps1 is None:
            eps1 = torch.finfo(param.dtype).eps
        grad = -grad if group["maximize"] else grad
        step += 1
        count = widen(step.to(param.device))
        size_root = param.numel() ** 0.5  # a norm divided by it is a root mean square
        beta2_weight = (count ** group["beta2_decay"]).to(param.dtype)
        rho = count.rsqrt().clamp(max=lr)
        alpha = (widen(param.norm(2)) / size_root).clamp(min=eps2) * rho
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        if row_var is not None and col_var is not None:
            row_mean = torch.norm(grad, dim=-1, keepdim=True).square().div(grad.size(-1))
            col_mean = torch.norm(grad, dim=-2, keepdim=True).square().div(grad.size(-2))
            row_var.lerp_(row_mean, beta2_weight)
            col_var.lerp_(col_mean, beta2_weight)
            estimate = (row_var @ col_var) / row_var.mean(dim=-2, keepdim=True).clamp(min=eps1)
        else:
            assert variance is not None
            variance.lerp_(grad * grad, beta2_weight)
            estimate = variance
        update = estimate.clamp(min=eps1 * eps1).rsqrt() * grad
        clipping = (widen(update.norm(2)) / (size_root * group["d"])).clamp(min=1.0)
        param.sub_(update * (alpha / clipping).to(param.dtype))


#: The class that runs instead of one of torch.optim, unless with capturable=True.
BRANCHLESS: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.ASGD: ASGD,
    torch.optim.RAdam: RAdam,
    torch.optim.Adafactor: Adafactor,
}
