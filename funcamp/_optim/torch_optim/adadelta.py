"""Adadelta (Zeiler, 2012)."""

from __future__ import annotations

from torch import Tensor

from funcamp._optim.arithmetic import add, plus
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, average_of_squares, with_l2, zeros


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    square_avg = average_of_squares(state["square_avg"], grad, h.rho)
    delta = plus(state["acc_delta"], h.eps).sqrt() / plus(square_avg, h.eps).sqrt() * grad
    acc_delta = average_of_squares(state["acc_delta"], delta, h.rho)
    new_state = {"step": state["step"] + 1, "square_avg": square_avg, "acc_delta": acc_delta}
    return add(param, delta, -h.lr), new_state


ADADELTA = UpdateRule(zeros("square_avg", "acc_delta"), _step, ("lr", "rho", "eps", "weight_decay", "maximize"))
