"""Adam and what was made of it: averages of the gradient and of its square."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import Number, addcdiv, lerp, over, plus, times
from funcamp._optim.torch_optim.rule import (
    Arguments,
    State,
    UpdateRule,
    average_of_squares,
    count,
    count_and_zeros,
    scalar,
    with_decay,
    with_l2,
)
from funcamp._scaler.state import widen

# Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019).


def _init(param: Tensor, h: Arguments) -> State:
    names = ["exp_avg", "exp_avg_sq"]
    if h.amsgrad:
        names.append("max_exp_avg_sq")
    return count_and_zeros(param, *names)


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    beta1, beta2 = h.betas
    param, grad = with_decay(param, grad, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = average_of_squares(state["exp_avg_sq"], grad, beta2)
    new_state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if h.amsgrad:
        exp_avg_sq = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq)
        new_state["max_exp_avg_sq"] = exp_avg_sq

    step_size = h.lr / (1 - beta1**step)
    root = over(exp_avg_sq.sqrt(), (1 - beta2**step) ** 0.5)
    return addcdiv(param, exp_avg, plus(root, h.eps), -step_size), new_state


_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
ADAM = UpdateRule(_init, _step, (*_ARGUMENTS, "decoupled_weight_decay"))
ADAMW = UpdateRule(_init, _step, _ARGUMENTS)


# Adamax (Kingma and Ba, 2015): the largest gradient in place of the second moment.


def _adamax_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    beta1, beta2 = h.betas
    grad = with_l2(grad, param, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_inf = torch.maximum(times(state["exp_inf"], beta2), plus(grad.abs(), h.eps))
    rate = h.lr / (1 - beta1 ** count(state))
    new_state = {"exp_avg": exp_avg, "exp_inf": exp_inf}
    return addcdiv(param, exp_avg, exp_inf, -rate), new_state


ADAMAX = UpdateRule(
    lambda param, _: count_and_zeros(param, "exp_avg", "exp_inf"),
    _adamax_step,
    ("lr", "betas", "eps", "weight_decay", "maximize"),
)


# NAdam (Dozat, 2016): Nesterov's momentum.


def _nadam_init(param: Tensor, _: Arguments) -> State:
    return {**count_and_zeros(param, "exp_avg", "exp_avg_sq"), "mu_product": scalar(1.0, param)}


def _nadam_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    beta1, beta2 = h.betas
    param, grad = with_decay(param, grad, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = average_of_squares(state["exp_avg_sq"], grad, beta2)

    mu, next_mu = _nadam_mu(beta1, step, h), _nadam_mu(beta1, step + 1, h)
    mu_product = (state["mu_product"] * mu).to(state["mu_product"].dtype)
    product = widen(mu_product)
    denominator = plus(over(exp_avg_sq, 1 - beta2**step).sqrt(), h.eps)
    param = addcdiv(param, grad, denominator, -h.lr * (1.0 - mu) / (1.0 - product))
    param = addcdiv(param, exp_avg, denominator, -h.lr * next_mu / (1.0 - product * next_mu))
    return param, {
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "mu_product": mu_product,
    }


def _nadam_mu(beta1: Number, step: Tensor, h: Arguments) -> Tensor:
    """Return the momentum of a step."""
    mu: Tensor = beta1 * (1.0 - 0.5 * 0.96 ** (step * h.momentum_decay))
    return mu


NADAM = UpdateRule(
    _nadam_init,
    _nadam_step,
    ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
)


# RAdam (Liu et al., 2020): plain momentum until the second moment is known well enough.


def _radam_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
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
    return param, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


RADAM = UpdateRule(
    lambda param, _: count_and_zeros(param, "exp_avg", "exp_avg_sq"),
    _radam_step,
    ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
)
