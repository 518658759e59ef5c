"""NAdam (Dozat, 2016): Adam with Nesterov's momentum."""

from __future__ import annotations

from torch import Tensor

from funcamp._optim.arithmetic import Number, addcdiv, lerp, over, plus, wide
from funcamp._optim.torch_optim.rule import (
    Arguments,
    State,
    UpdateRule,
    average_of_squares,
    count,
    scalar,
    with_decay,
    zeros,
)


def _init(param: Tensor, h: Arguments) -> State:
    return {**zeros("exp_avg", "exp_avg_sq")(param, h), "mu_product": scalar(1.0, param)}


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    beta1, beta2 = h.betas
    param, grad = with_decay(param, grad, h)
    exp_avg = lerp(state["exp_avg"], grad, 1 - beta1)
    exp_avg_sq = average_of_squares(state["exp_avg_sq"], grad, beta2)

    mu, next_mu = _mu(beta1, step, h), _mu(beta1, step + 1, h)
    mu_product = (state["mu_product"] * mu).to(state["mu_product"].dtype)
    product = wide(mu_product)
    denominator = plus(over(exp_avg_sq, 1 - beta2**step).sqrt(), h.eps)
    param = addcdiv(param, grad, denominator, -h.lr * (1.0 - mu) / (1.0 - product))
    param = addcdiv(param, exp_avg, denominator, -h.lr * next_mu / (1.0 - product * next_mu))
    return param, {
        "step": state["step"] + 1,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "mu_product": mu_product,
    }


def _mu(beta1: Number, step: Tensor, h: Arguments) -> Tensor:
    """Return the momentum of a step."""
    mu: Tensor = beta1 * (1.0 - 0.5 * 0.96 ** (step * h.momentum_decay))
    return mu


NADAM = UpdateRule(
    _init, _step, ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")
)
