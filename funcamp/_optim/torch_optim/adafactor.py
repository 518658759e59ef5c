"""Adafactor (Shazeer and Stern, 2018): the second moment of a matrix is kept as its rows' and columns' means."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._optim.arithmetic import Number, add, clamp, lerp, like
from funcamp._optim.torch_optim.rule import Arguments, State, UpdateRule, count, decayed, scalar
from funcamp._scaler.state import widen


def _init(param: Tensor, _: Arguments) -> State:
    state = {"step": scalar(0.0, param)}
    if param.dim() < 2:
        return {**state, "variance": torch.zeros_like(param)}
    *batch, rows, columns = param.shape
    return {**state, "row_var": param.new_zeros((*batch, rows, 1)), "col_var": param.new_zeros((*batch, 1, columns))}


def _step(param: Tensor, grad: Tensor, state: State, h: Arguments) -> tuple[Tensor, State]:
    step = count(state)
    eps1, eps2 = h.eps
    if eps1 is None:
        eps1 = torch.finfo(param.dtype).eps
    relative_rate = torch.minimum(like(h.lr, step), 1 / step**0.5)
    rate = clamp(_root_mean_square(param), eps2) * relative_rate
    param = decayed(param, h)
    new_state, variance = _variance(grad, state, step**h.beta2_decay, eps1)
    update = clamp(variance, eps1 * eps1).rsqrt() * grad
    clipping = clamp(_root_mean_square(update) / h.d, 1.0)
    return add(param, update, -rate / clipping), new_state


def _variance(grad: Tensor, state: State, weight: Tensor, eps1: Number) -> tuple[State, Tensor]:
    """Return the new moments and the second moment of every element."""
    if grad.dim() < 2:
        variance = lerp(state["variance"], grad * grad, weight)
        return {"variance": variance}, variance
    row_var = lerp(state["row_var"], _mean_of_squares(grad, -1), weight)
    col_var = lerp(state["col_var"], _mean_of_squares(grad, -2), weight)
    variance = row_var @ col_var / clamp(row_var.mean(dim=-2, keepdim=True), eps1)
    return {"row_var": row_var, "col_var": col_var}, variance


def _mean_of_squares(grad: Tensor, dim: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad, dim=dim, keepdim=True)
    return norm.square() / grad.size(dim)


def _root_mean_square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return widen(norm) / float(tensor.numel() ** 0.5)


ADAFACTOR = UpdateRule(
    _init,
    _step,
    ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
    elementwise=False,
    takes_complex=False,
)
