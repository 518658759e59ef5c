"""Adagrad (Duchi et al., 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import addcdiv, plus
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count, with_l2, zeros


def _init(param: Tensor, h: Arguments) -> State:
    state = zeros("sum")(param, h)
    state["sum"] = plus(state["sum"], h.initial_accumulator_value)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    rate = h.lr / (1 + (count(state) - 1) * h.lr_decay)
    total = torch.addcmul(state["sum"], grad, grad)
    return addcdiv(param, grad, plus(total.sqrt(), h.eps), -rate), {"step": state["step"] + 1, "sum": total}


ADAGRAD = UpdateRule(_init, _step, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"))
