"""Stochastic gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import add, is_zero, times
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count, count_and_zeros, scalar, with_l2, zeros
from funcamp._scaler.state import widen

# SGD with momentum (Sutskever et al., 2013), Nesterov's too.


#: The entry that counts the steps of a parameter, with dampening: the first gradient is not dampened. torch has no such
#: entry, but no buffer before the first step.
APPLIED_ENTRY = "funcamp_applied"


def _init(param: Tensor, h: Arguments) -> State:
    if is_zero(h.momentum):
        return {}
    state = zeros(param, "momentum_buffer")
    if not is_zero(h.dampening):
        state[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    if is_zero(h.momentum):
        return add(param, grad, -h.lr), {}
    new_state = {"momentum_buffer": add(times(state["momentum_buffer"], h.momentum), grad, 1 - h.dampening)}
    if not is_zero(h.dampening):
        is_first = state[APPLIED_ENTRY] == 0
        new_state["momentum_buffer"] = torch.where(is_first, grad, new_state["momentum_buffer"])
        new_state[APPLIED_ENTRY] = state[APPLIED_ENTRY] + 1
    update = new_state["momentum_buffer"]
    if h.nesterov:
        update = add(grad, update, h.momentum)
    return add(param, update, -h.lr), new_state


SGD = UpdateRule(_init, _step, ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"))


# ASGD, averaged (Polyak and Juditsky, 1992).


def _asgd_init(param: Tensor, h: Arguments) -> State:
    return {**count_and_zeros(param, "ax"), "eta": scalar(h.lr, param), "mu": scalar(1.0, param)}


def _asgd_step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step, eta, mu = count(state), widen(state["eta"]), state["mu"]
    grad = with_l2(grad, param, h)
    param = add(times(param, 1 - h.lambd * eta), grad, -eta)
    ax = torch.where(mu == 1, param, state["ax"] + times(param - state["ax"], mu))
    next_eta = h.lr / (1 + h.lambd * h.lr * step) ** h.alpha
    next_mu = 1 / torch.clamp(step - h.t0, min=1)
    return param, {
        "ax": ax,
        "eta": next_eta.to(state["eta"].dtype),
        "mu": next_mu.to(mu.dtype),
    }


ASGD = UpdateRule(_asgd_init, _asgd_step, ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"))
