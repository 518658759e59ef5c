"""Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funcamp._optim.arithmetic import add, clamp, lerp
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, decayed, zeros


def _init(param: Tensor, _: Arguments) -> State:
    return zeros(param, "momentum_buffer")


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    buffer = lerp(state["momentum_buffer"], grad, 1 - h.momentum)
    update = lerp(grad, buffer, h.momentum) if h.nesterov else buffer
    update = _orthogonal(update, h)
    rate = h.lr * _ratio(param, h)
    # In float32 if the parameter is float16, beside which the update is bfloat16.
    computed_in = torch.promote_types(param.dtype, update.dtype)
    moved = add(decayed(param, h).to(computed_in), update.to(computed_in), -rate)
    return moved.to(param.dtype), {"momentum_buffer": buffer}


def _ratio(param: Tensor, h: Arguments) -> float:
    """Return the factor of the learning rate for a matrix of this shape."""
    rows, columns = param.shape
    ratios = {
        "original": math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "spectral_unclamped": math.sqrt(rows / columns),  # from torch 2.15 on
    }
    return ratios[h.adjust_lr_fn or "original"]


def _orthogonal(grad: Tensor, h: Arguments) -> Tensor:
    """Return about the orthogonal matrix nearest to a gradient, by steps of Newton and Schulz in bfloat16."""
    a, b, c = h.ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    x = grad.bfloat16()
    if is_tall:
        x = x.T
    x = x / clamp(x.norm(), h.eps)
    for _ in range(h.ns_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


MUON = UpdateRule(
    _init,
    _step,
    ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    elementwise=False,
    takes_complex=False,
    dims=2,
    constants=("ns_steps", "ns_coefficients", "adjust_lr_fn"),
)
