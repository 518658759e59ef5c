"""ASGD, averaged stochastic gradient descent (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import add, times, wide
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count, scalar, with_l2, zeros


def _init(param: Tensor, h: Arguments) -> State:
    return {**zeros("ax")(param, h), "eta": scalar(h.lr, param), "mu": scalar(1.0, param)}


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step, eta, mu = count(state), wide(state["eta"]), state["mu"]
    grad = with_l2(grad, param, h)
    param = add(times(param, 1 - h.lambd * eta), grad, -eta)
    ax = torch.where(mu == 1, param, state["ax"] + times(param - state["ax"], mu))
    next_eta = h.lr / (1 + h.lambd * h.lr * step) ** h.alpha
    next_mu = 1 / torch.clamp(step - h.t0, min=1)
    return param, {
        "step": state["step"] + 1,
        "ax": ax,
        "eta": next_eta.to(state["eta"].dtype),
        "mu": next_mu.to(mu.dtype),
    }


ASGD = UpdateRule(_init, _step, ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"))
