"""Clip gradients by their global norm or by value."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import real
from funcamp._dtensor import Across, group_by_mesh_dims, local, settled_sum, total
from funcamp._storage.params import check_not_sharded
from funcamp._types import Tree


def clip_grad_norm(grads: Tree, max_norm: float | Tensor) -> tuple[Tree, Tensor]:
    """Scale unscaled gradients so that their global 2-norm is at most max_norm.

    norm = ||(||g_1||, ..., ||g_n||)||; grad = grad * min(1, max_norm / (norm + 1e-6)). If a gradient is not finite, a
    clipped one is not either, and `skip_step` drops them all by the flag. If gradients are finite and their norm
    overflows (float32 from about 1e19), they become zeros, as in torch, and no flag is set. Pure; safe under
    torch.compile and vmap; no sync.

    Args:
        grads: a pytree of floating-point or complex gradients on one device, after `unscale_and_check`; None passes
            through.
        max_norm: a positive Python number, or a tensor of shape ().

    Returns:
        The clipped gradients in their dtypes, and the norm before clipping, float32 or wider, shape (); 0 for an empty
        tree.

    Raises:
        TypeError: a leaf is an integer tensor, is sparse, or is neither a tensor nor None; max_norm is neither a
            number nor a tensor.
        ValueError: max_norm is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clip_grad_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
        ({'w': tensor([0.6000, 0.8000])}, tensor(5.))

    References:
        `torch.nn.utils.clip_grad_norm_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_not_sharded("clip_grad_norm", "grads", grads)
    flat, spec = _tree.parameters("clip_grad_norm", "grads", grads)
    check_limit("clip_grad_norm", "max_norm", max_norm)
    settled = [settled_sum(leaf) for leaf in flat if leaf is not None]
    norms = [_norm(across, leaves) for across, leaves in group_by_mesh_dims(settled)]
    if not norms:
        return grads, torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    factor = coefficient(max_norm, norm)
    return _tree.map_leaves(lambda leaf: shortened(leaf, factor.to(leaf.device)), flat, spec), norm


def clip_grad_value(grads: Tree, max_value: float | Tensor) -> Tree:
    """Clamp every element of unscaled gradients to [-max_value, max_value].

    A NaN remains; `skip_step` drops it. Pure; safe under torch.compile and vmap; no sync.

    Args:
        grads: a pytree of floating-point gradients, after `unscale_and_check`; None passes through.
        max_value: a positive Python number, or a tensor of shape ().

    Returns:
        The clamped gradients.

    Raises:
        TypeError: a leaf is an integer, complex or sparse tensor, or neither a tensor nor None; max_value is neither a
            number nor a tensor.
        ValueError: max_value is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clip_grad_value([torch.tensor([3.0, -0.5])], 1.0)
        [tensor([ 1.0000, -0.5000])]

    References:
        `torch.nn.utils.clip_grad_value_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    flat, spec = _tree.parameters("clip_grad_value", "grads", grads)
    check_limit("clip_grad_value", "max_value", max_value)
    for index, leaf in enumerate(flat):
        if leaf is not None and leaf.is_complex():
            raise TypeError(
                f"clip_grad_value: grads{_tree.path_of(grads, index)} must be real; got {_tree.describe(leaf)}"
            )
    return _tree.map_leaves(lambda leaf: clamp(leaf, max_value), flat, spec)


def check_limit(call: str, name: str, limit: object) -> None:
    """Raise TypeError or ValueError if a limit is neither a positive number nor a tensor of shape ()."""
    if isinstance(limit, Tensor):
        if limit.dim() != 0:
            raise ValueError(f"{call}: {name} must have shape (); got {tuple(limit.shape)}")
    elif not real(call, name, limit, "a number or a tensor") > 0:
        raise ValueError(f"{call}: {name} must be positive; got {limit}")


def coefficient(max_norm: float | Tensor, norm: Tensor) -> Tensor:
    """Return the factor, at most 1, for gradients of this norm."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def shortened(leaf: Tensor, factor: Tensor) -> Tensor:
    """Multiply one gradient by the factor, in its own dtype; the product of two tensors of shape () may be wider."""
    return (leaf * factor).to(leaf.dtype)


def clamp(leaf: Tensor, max_value: float | Tensor) -> Tensor:
    """Clamp one gradient in its own dtype."""
    if isinstance(max_value, Tensor):
        max_value = max_value.to(leaf.dtype)
        return torch.minimum(torch.maximum(leaf, -max_value), max_value)
    return leaf.clamp(-max_value, max_value)


def _norm(across: Across | None, grads: list[Tensor]) -> Tensor:
    """Return the norm of tensors whose parts are on the same ranks; `across` is None if this rank has all of each."""
    norms = []
    for grad in grads:
        local_grad = local(grad)
        norms.append(torch.linalg.vector_norm(local_grad, dtype=_norm_dtype(local_grad)))
    local_norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if across is None:
        return local_norm
    return total(local_norm.square(), across).sqrt()


def _norm_dtype(grad: Tensor) -> torch.dtype | None:
    """Return the dtype in which a norm is computed, None for the gradient's own."""
    return torch.float32 if grad.is_floating_point() and grad.dtype.itemsize < 4 else None
