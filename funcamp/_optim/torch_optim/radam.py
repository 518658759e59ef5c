"""RAdam (Liu et al., 2020): Adam, with plain momentum until the second moment is known well enough."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import lerp, over, plus, times
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, average_of_squares, count, with_decay, zeros


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    beta1, beta2 = h.betas
    param, grad = with_decay(param, grad, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = average_of_squares(state["exp_avg_sq"], grad, beta2)

    correction = 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / correction
    rectified = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
    plain = times(over(exp_avg, 1 - beta1**step), h.lr)
    inverse_root = times(torch.ones_like(exp_avg_sq), correction**0.5) / plus(exp_avg_sq.sqrt(), h.eps)
    adaptive = times(plain * inverse_root, rectified)
    param = param - torch.where(length > 5.0, adaptive, plain)
    return param, {"step": state["step"] + 1, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


RADAM = UpdateRule(
    zeros("exp_avg", "exp_avg_sq"), _step, ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
)
