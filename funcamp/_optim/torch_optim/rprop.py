"""Rprop, resilient backpropagation (Riedmiller and Braun, 1993): steps whose size depends on signs only."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import clamp, like, plus
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count_and_zeros


def _init(param: Tensor, h: Arguments) -> State:
    state = count_and_zeros(param, "prev", "step_size")
    state["step_size"] = plus(state["step_size"], h.lr)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    sign = (grad * state["prev"]).sign()
    shrink, grow = (like(eta, sign) for eta in h.etas)
    factor = torch.where(sign > 0, grow, torch.where(sign < 0, shrink, torch.ones_like(sign)))
    step_size = clamp(state["step_size"] * factor, *h.step_sizes)
    grad = torch.where(sign < 0, torch.zeros_like(grad), grad)
    param = torch.addcmul(param, grad.sign(), step_size, value=-1)
    return param, {"prev": grad, "step_size": step_size}


RPROP = UpdateRule(_init, _step, ("lr", "etas", "step_sizes", "maximize"))
