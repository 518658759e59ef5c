"""SGD with momentum (Sutskever et al., 2013), Nesterov's too."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import add, is_zero, times
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, with_l2, zeros_like

#: The entry that counts the steps of a parameter, with dampening: the first gradient is not dampened. torch has no such
#: entry, but no buffer before the first step.
APPLIED_ENTRY = "funcamp_applied"


def _init(param: Tensor, h: Arguments) -> State:
    if is_zero(h.momentum):
        return {}
    state = zeros_like(param, "momentum_buffer")
    if not is_zero(h.dampening):
        state[APPLIED_ENTRY] = torch.zeros((), dtype=torch.int64, device=param.device)
    return state


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    grad = with_l2(grad, param, h)
    if is_zero(h.momentum):
        return add(param, grad, -h.lr), {}
    new_state = {"momentum_buffer": add(times(state["momentum_buffer"], h.momentum), grad, 1 - h.dampening)}
    if APPLIED_ENTRY in state:
        is_first = state[APPLIED_ENTRY] == 0
        new_state["momentum_buffer"] = torch.where(is_first, grad, new_state["momentum_buffer"])
        new_state[APPLIED_ENTRY] = state[APPLIED_ENTRY] + 1
    update = new_state["momentum_buffer"]
    if h.nesterov:
        update = add(grad, update, h.momentum)
    if isinstance(h.momentum, Tensor):  # torch neither reads nor writes the buffer if it is 0
        is_used = h.momentum != 0
        update = torch.where(is_used, update, grad)
        new_state = {name: torch.where(is_used, new, state[name]) for name, new in new_state.items()}
    return add(param, update, -h.lr), new_state


SGD = UpdateRule(_init, _step, ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"))
