"""Adagrad and what was made of it: the gradient over a root of squares."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import add, addcdiv, is_zero, lerp, plus, times
from funcamp._optim.torch_optim.rule import (
    Arguments,
    State,
    UpdateRule,
    average_of_squares,
    count,
    count_and_zeros,
    with_l2,
)

# Adagrad (Duchi et al., 2011).


def _init(param: Tensor, h: Arguments) -> State:
    state = count_and_zeros(param, "sum")
    state["sum"] = plus(state["sum"], h.initial_accumulator_value)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    rate = h.lr / (1 + (count(state) - 1) * h.lr_decay)
    total = torch.addcmul(state["sum"], grad, grad)
    return addcdiv(param, grad, plus(total.sqrt(), h.eps), -rate), {"sum": total}


ADAGRAD = UpdateRule(_init, _step, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"))


# Adadelta (Zeiler, 2012).


def _adadelta_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    square_avg = average_of_squares(state["square_avg"], grad, h.rho)
    delta = plus(state["acc_delta"], h.eps).sqrt() / plus(square_avg, h.eps).sqrt() * grad
    acc_delta = average_of_squares(state["acc_delta"], delta, h.rho)
    new_state = {"square_avg": square_avg, "acc_delta": acc_delta}
    return add(param, delta, -h.lr), new_state


ADADELTA = UpdateRule(
    lambda param, _: count_and_zeros(param, "square_avg", "acc_delta"),
    _adadelta_step,
    ("lr", "rho", "eps", "weight_decay", "maximize"),
)


# RMSprop (Hinton, 2012).


def _rmsprop_init(param: Tensor, h: Arguments) -> State:
    names = ["square_avg"]
    if not is_zero(h.momentum):
        names.append("momentum_buffer")
    if h.centered:
        names.append("grad_avg")
    return count_and_zeros(param, *names)


def _rmsprop_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    square_avg = average_of_squares(state["square_avg"], grad, h.alpha)
    new_state = {"square_avg": square_avg}
    variance = square_avg
    if h.centered:
        grad_avg = lerp(state["grad_avg"], grad, 1 - h.alpha)
        new_state["grad_avg"] = grad_avg
        variance = torch.addcmul(square_avg, grad_avg, grad_avg, value=-1)
    denominator = plus(variance.sqrt(), h.eps)
    if is_zero(h.momentum):
        return addcdiv(param, grad, denominator, -h.lr), new_state
    buffer = addcdiv(times(state["momentum_buffer"], h.momentum), grad, denominator, 1.0)
    return add(param, buffer, -h.lr), {**new_state, "momentum_buffer": buffer}


RMSPROP = UpdateRule(
    _rmsprop_init, _rmsprop_step, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
)
