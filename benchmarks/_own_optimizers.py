"""Optimizers as people write them in their own repositories, for optimizers.py: forms that the packages lack.

Each is written anew, in the form that is named. None is meant to be a good one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: Of five steps of Newton and Schulz that bring singular values near 1; the numbers of Keller Jordan's Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class CountsInGroup(torch.optim.Optimizer):
    """AdamW that counts its steps in its param group, and computes with the count in Python."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            correction1 = 1 - beta1 ** group["step"]
            correction2 = math.sqrt(1 - beta2 ** group["step"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                divisor = (state["exp_avg_sq"].sqrt() / correction2).add_(group["eps"])
                param.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / correction1)


class KahanAdamW(torch.optim.Optimizer):
    """AdamW that keeps what rounding to a narrow parameter loses, and adds it again at the next step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                    narrow = param.dtype in (torch.float16, torch.bfloat16)
                    state["lost"] = torch.zeros_like(param) if narrow else None
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                average = state["exp_avg"].float() / (1 - beta1 ** state["step"])
                square = state["exp_avg_sq"].float() / (1 - beta2 ** state["step"])
                change = average / (square.sqrt() + group["eps"]) + group["weight_decay"] * param.float()
                if state["lost"] is None:
                    param.sub_(change, alpha=group["lr"])
                    continue
                wanted = state["lost"] - (group["lr"] * change).to(param.dtype)
                before = param.clone()
                param.add_(wanted)
                state["lost"].copy_(wanted - (param - before))


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    eps: Tensor,
) -> None:
    """Take AdamW's step in place; all numbers are tensors, so that a compiler makes one program for all of them."""
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    divisor = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    param.sub_(lr / (1 - beta1**step) * exp_avg / divisor)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices and AdamW for the rest in one optimizer: each param group says which, by its "kind".

    In the form of nanochat's: matrices of one shape are stacked, and their state is in the first of them; AdamW's
    numbers are tensors of shape () in the instance, filled at every step.
    """

    _adamw_update = staticmethod(adamw_update)

    def __init__(self, params: Any, lr: float = 1e-2, kind: str = "adamw", momentum: float = 0.95) -> None:
        defaults = {"lr": lr, "kind": kind, "momentum": momentum, "betas": (0.8, 0.95), "eps": 1e-10}
        super().__init__(params, defaults)
        names = ("step", "lr", "beta1", "beta2", "eps")
        self._numbers = {name: torch.zeros((), dtype=torch.float32) for name in names}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step."""
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._muon(group)
            elif group["kind"] == "adamw":
                self._adamw(group)
            else:
                raise ValueError(f"kind must be muon or adamw; got {group['kind']}")

    def _adamw(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            numbers = self._numbers
            numbers["step"].fill_(state["step"])
            numbers["lr"].fill_(group["lr"])
            numbers["beta1"].fill_(group["betas"][0])
            numbers["beta2"].fill_(group["betas"][1])
            numbers["eps"].fill_(group["eps"])
            self._adamw_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], **numbers)

    def _muon(self, group: dict[str, Any]) -> None:
        shapes = dict.fromkeys(param.shape for param in group["params"])
        for shape in shapes:
            params = [param for param in group["params"] if param.shape == shape]
            grads = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grads)
            state["momentum_buffer"].lerp_(grads, 1 - group["momentum"])
            update = grads.lerp_(state["momentum_buffer"], group["momentum"])
            updates = _orthogonal(update) * max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_sub_(params, list(updates.unbind()), alpha=group["lr"])


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices whose singular values are near 1."""
    first, second, third = _COEFFICIENTS
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for _ in range(5):
        product = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
        mixed = second * product + third * (product @ product)
        x = first * x + (mixed @ x if x.shape[-2] <= x.shape[-1] else x @ mixed)
    return x


class CompiledMuonAdamW(MuonAdamW):
    """The same with its AdamW under torch.compile."""

    _adamw_update = staticmethod(torch.compile(adamw_update, dynamic=False, fullgraph=True, backend="eager"))
