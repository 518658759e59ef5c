"""Clip gradients by their global norm."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._types import Tree


def clip_grad_norm(grads: Tree, max_norm: float | Tensor) -> tuple[Tree, Tensor]:
    """Scale unscaled gradients so that their global 2-norm is at most max_norm.

    norm = ||(||g_1||, ..., ||g_n||)||; grad = grad * min(1, max_norm / (norm + 1e-6)). Where norm is not finite the
    result is not either; `skip_step` drops it. Pure; safe under torch.compile and vmap; no sync.

    Args:
        grads: a pytree of floating-point or complex gradients on one device, after `unscale_and_check`; None passes
            through.
        max_norm: a positive Python number, or a tensor of shape ().

    Returns:
        The clipped gradients and the norm before clipping, float32 or wider, shape (); 0 for an empty tree.

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
    flat, spec = _tree.tensors("clip_grad_norm", "grads", grads)
    for index, leaf in enumerate(flat):
        if leaf is None:
            continue
        if not (leaf.is_floating_point() or leaf.is_complex()) or leaf.layout != torch.strided:
            raise TypeError(
                f"clip_grad_norm: grads{_tree.path_of(grads, index)} must be a strided floating-point or complex "
                f"tensor; got {_tree.describe(leaf)}"
            )
    if isinstance(max_norm, Tensor):
        if max_norm.dim() != 0:
            raise ValueError(f"clip_grad_norm: max_norm must have shape (); got {tuple(max_norm.shape)}")
    elif isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real):
        raise TypeError(f"clip_grad_norm: max_norm must be a number or a tensor; got {max_norm!r}")
    elif not max_norm > 0:
        raise ValueError(f"clip_grad_norm: max_norm must be positive; got {max_norm}")
    norms = [torch.linalg.vector_norm(leaf, dtype=_norm_dtype(leaf)) for leaf in flat if leaf is not None]
    if not norms:
        return grads, torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(norms))
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return _tree.map_leaves(lambda leaf: leaf * coefficient.to(leaf.device), flat, spec), norm


def _norm_dtype(leaf: Tensor) -> torch.dtype | None:
    return torch.float32 if leaf.is_floating_point() and leaf.dtype.itemsize < 4 else None
