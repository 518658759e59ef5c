"""Adamax (Kingma and Ba, 2015): Adam with the largest gradient in place of the second moment."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import addcdiv, lerp, plus, times
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count, with_l2, zeros


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    beta1, beta2 = h.betas
    grad = with_l2(grad, param, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_inf = torch.maximum(times(state["exp_inf"], beta2), plus(grad.abs(), h.eps))
    rate = h.lr / (1 - beta1 ** count(state))
    new_state = {"step": state["step"] + 1, "exp_avg": exp_avg, "exp_inf": exp_inf}
    return addcdiv(param, exp_avg, exp_inf, -rate), new_state


ADAMAX = UpdateRule(zeros("exp_avg", "exp_inf"), _step, ("lr", "betas", "eps", "weight_decay", "maximize"))
