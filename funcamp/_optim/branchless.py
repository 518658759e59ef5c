"""RAdam and ASGD without torch.optim's branch on the step count, which reads it on the host.

torch.optim has such formulas for `capturable=True`, but rejects that on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._scaler.torch_rule import widen


class RAdam(torch.optim.RAdam):
    """torch.optim.RAdam with its state, arguments and arithmetic: torch/optim/radam.py, PyTorch 2.13."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  the class's signature
        """Take one step for every parameter that has a gradient."""
        for group in self.param_groups:
            found: list[list[Tensor]] = [[] for _ in range(5)]
            self._init_group(group, *found)  # type: ignore[no-untyped-call]
            for tensors in zip(*found):
                _radam(group, *[torch.view_as_real(part) if part.is_complex() else part for part in tensors])


def _radam(group: dict[str, Any], param: Tensor, grad: Tensor, average: Tensor, squares: Tensor, count: Tensor) -> None:
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    grad = -grad if group["maximize"] else grad
    count += 1
    if isinstance(decay, Tensor) or decay != 0:
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


class ASGD(torch.optim.ASGD):
    """torch.optim.ASGD with its state, arguments and arithmetic: torch/optim/asgd.py, PyTorch 2.13."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  the class's signature
        """Take one step for every parameter that has a gradient."""
        for group in self.param_groups:
            found: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *found)  # type: ignore[no-untyped-call]
            for tensors in zip(*found):
                _asgd(group, *[torch.view_as_real(part) if part.is_complex() else part for part in tensors])


def _asgd(
    group: dict[str, Any], param: Tensor, grad: Tensor, mu: Tensor, average: Tensor, eta: Tensor, count: Tensor
) -> None:
    lr, decay, lambd = group["lr"], group["weight_decay"], group["lambd"]
    grad = -grad if group["maximize"] else grad
    count += 1
    if isinstance(decay, Tensor) or decay != 0:
        grad = grad.add(param, alpha=decay)
    rate = widen(eta)
    param.mul_((1 - lambd * rate).to(param.dtype))  # without the cast vmap multiplies in float64
    param.add_(grad * -rate)
    average.copy_(torch.where(mu == 1, param, average + (param - average) * mu))
    step = widen(count)
    eta.copy_(lr / (1 + lambd * lr * step) ** group["alpha"])
    mu.copy_(1 / (step - group["t0"]).clamp(min=1))
