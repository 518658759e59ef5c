"""Unscale and check gradients in place in two passes, for `GradScaler` in an ordinary loop.

    grad      <- f32(grad) * f32(1 / f64(scale)), rounded once to the gradient's type
    found_inf <- 1 if any product is not finite

Multiplication by a positive number and rounding are monotone, so every product is finite if and only if the product of
the largest magnitude is. One reading for the check, at any scale. torch's kernel checks before it multiplies.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._dtensor import any_in_meshes, is_distributed, local, sum_partials


def by_device(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> dict[torch.device, list[Tensor]]:
    """Return the gradients by device; the values of a sparse gradient, coalesced first if it is float16.

    Raises:
        AssertionError: a parameter is not a tensor.
        TypeError: optimizer has no parameter groups.
        ValueError: a gradient is float16, without allow_fp16.
    """
    grads: dict[torch.device, list[Tensor]] = defaultdict(list)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"GradScaler: optimizer must be a torch.optim.Optimizer; got {_tree.brief(optimizer)}")
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(param).__name__}")
            if param.grad is None:
                continue
            if param.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            if param.grad.is_sparse and param.grad.dtype == torch.float16:
                param.grad = param.grad.coalesce()  # its sums may overflow, so they are checked
            grad = param.grad._values() if param.grad.is_sparse else param.grad
            grads[grad.device].append(grad)
    return grads


def unscale(
    grads: list[Tensor], inv_scale: Tensor, *, may_grow: bool = True, only_check_scale: Tensor | None = None
) -> Tensor:
    """Multiply gradients on one device in place; return the flag, float32, shape (), 1.0 or 0.0.

    may_grow: whether inv_scale may be above 1. If not, torch's single kernel is correct.
    only_check_scale: the scale; return the flag for multiplication or division, without changing gradients.
    """
    found_inf = torch.zeros_like(inv_scale)
    for group in _by_dtype([local(grad) for grad in grads]):
        if type(group[0]) is not Tensor or not may_grow:
            # torch's kernel, for subclasses that implement it, and if no product can overflow. It writes the flag.
            factor = inv_scale if only_check_scale is None else torch.ones_like(inv_scale)
            _upstream.unscale_each(group, found_inf, factor)
            continue
        largest = _largest(group)
        is_finite = torch.isfinite(_times(largest, inv_scale))
        if only_check_scale is None:
            _multiply(group, inv_scale)
        else:
            is_finite &= torch.isfinite(largest / only_check_scale)
        found_inf = torch.maximum(found_inf, (~is_finite).float())
    return _on_all_ranks(found_inf, grads)


def _on_all_ranks(found_inf: Tensor, grads: list[Tensor]) -> Tensor:
    """Reduce the flag over the ranks of all DTensors; torch uses the first one's ranks for all."""
    dtensors = [grad for grad in grads if is_distributed(grad)]
    if not dtensors:
        return found_inf
    summed = [sum_partials(grad) for grad in dtensors]
    flags = [found_inf != 0]
    for total, dtensor in zip(summed, dtensors):
        # A sum of partial sums that are finite may be infinite.
        if total is not dtensor:
            flags.append(~torch.isfinite(local(total)).all())
    return any_in_meshes(torch.stack(flags).any(), summed).float()


def _by_dtype(grads: list[Tensor]) -> list[list[Tensor]]:
    """Return gradients with elements in groups of one class and dtype, complex ones as real numbers."""
    groups: dict[tuple[type, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.numel() == 0:
            continue
        tensor_class = Tensor if type(grad) is torch.nn.Parameter else type(grad)
        real_grad = torch.view_as_real(grad) if grad.is_complex() else grad
        groups[tensor_class, real_grad.dtype].append(real_grad)
    return list(groups.values())


def _largest(grads: list[Tensor]) -> Tensor:
    """Return the largest magnitude, or NaN if there is one."""
    if grads[0].device.type == "cpu":
        # Because eager CPU norms take ten times as long.
        extremes = [torch.stack(torch.aminmax(grad)) for grad in grads]
        return torch.stack(extremes).abs().max()
    return torch.stack(_upstream.norm_of_each(grads, math.inf)).max()


def _times(grad: Tensor, inv_scale: Tensor) -> Tensor:
    """Return the product, computed in float32 or wider and rounded once to the gradient's dtype."""
    if grad.dtype.itemsize < 4:
        return (grad.float() * inv_scale).to(grad.dtype)
    return grad * inv_scale


def _multiply(grads: list[Tensor], inv_scale: Tensor) -> None:
    """Multiply gradients of one dtype in place, as `_times` does."""
    if grads[0].dtype.itemsize < 4:
        _upstream.copy_each(grads, [_times(grad, inv_scale) for grad in grads])
    else:
        _upstream.multiply_each(grads, inv_scale)
