"""Rprop, resilient backpropagation (Riedmiller and Braun, 1993): steps whose size depends on signs only."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import clamp, plus, times
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, zeros


def _init(param: Tensor, h: Arguments) -> State:
    state = zeros("prev", "step_size")(param, h)
    state["step_size"] = plus(state["step_size"], h.lr)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    (etaminus, etaplus), (smallest, largest) = h.etas, h.step_sizes
    sign = (grad * state["prev"]).sign()
    ones = torch.ones_like(param)
    shrinking = times(ones, etaminus)
    factor = torch.where(sign > 0, times(ones, etaplus), torch.where(sign < 0, shrinking, ones))
    step_size = clamp(state["step_size"] * factor, smallest, largest)
    grad = torch.where(factor == shrinking, torch.zeros_like(grad), grad)
    param = torch.addcmul(param, grad.sign(), step_size, value=-1)
    return param, {"step": state["step"] + 1, "prev": grad, "step_size": step_size}


RPROP = UpdateRule(_init, _step, ("lr", "etas", "step_sizes", "maximize"))
