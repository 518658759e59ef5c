"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import addcdiv, lerp, over, plus
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, average_of_squares, count, with_decay, zeros


def _init(param: Tensor, h: Arguments) -> State:
    names = ["exp_avg", "exp_avg_sq"]
    if h.amsgrad:
        names.append("max_exp_avg_sq")
    return zeros(*names)(param, h)


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    beta1, beta2 = h.betas
    param, grad = with_decay(param, grad, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = average_of_squares(state["exp_avg_sq"], grad, beta2)
    new_state = {"step": state["step"] + 1, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if h.amsgrad:
        exp_avg_sq = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq)
        new_state["max_exp_avg_sq"] = exp_avg_sq

    step_size = h.lr / (1 - beta1**step)
    root = over(exp_avg_sq.sqrt(), (1 - beta2**step) ** 0.5)
    return addcdiv(param, exp_avg, plus(root, h.eps), -step_size), new_state


_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
ADAM = UpdateRule(_init, _step, (*_ARGUMENTS, "decoupled_weight_decay"))
ADAMW = UpdateRule(_init, _step, _ARGUMENTS)
