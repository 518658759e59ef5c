"""Clip gradients by their global norm or by value: functions, and parts of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import real
from funcamp._dtensor import Across, group_by_mesh_dims, local, sum_partials, total
from funcamp._optim.arithmetic import computed_once
from funcamp._optim.part import Update
from funcamp._storage.params import Params
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
    check_limit("clip_grad_norm", "max_norm", max_norm)
    norm = global_norm("clip_grad_norm", grads)
    return _scaled(grads, max_norm, norm), norm


def global_norm(call: str, grads: Tree) -> Tensor:
    """Return the 2-norm of all gradients, float32 or wider, shape (); 0 for an empty tree.

    Raises:
        TypeError: a leaf is an integer tensor, is sparse, or is neither a tensor nor None.
    """
    _tree.parameters(call, "grads", grads)
    summed = [sum_partials(leaf) for leaf in _tree.tensors_in(_tree.map_nodes(Params, _without_padding, grads))]
    norms = [_norm(across, leaves) for across, leaves in group_by_mesh_dims(summed)]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _without_padding(grads: Params) -> object:
    """Return the tensors of `Params`: a function of the groups may have made their padding other than zero."""
    # A rank has parts of sharded groups, and no tensors.
    return grads if grads.is_sharded() else grads.values()


def _scaled(grads: Tree, max_norm: float | Tensor, norm: Tensor) -> Tree:
    """Return gradients of this norm, each multiplied in its own dtype by a factor of at most 1."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    float32_factor = computed_once(factor.float())

    def scaled(grad: Tensor) -> Tensor:
        is_double = grad.dtype in (torch.float64, torch.complex128)
        # Two tensors of shape () are multiplied in the wider dtype, as torch does in place.
        used = factor if is_double or grad.dim() == 0 else float32_factor
        return (grad * used.to(grad.device)).to(grad.dtype)

    flat, spec = _tree.flatten(grads)
    return _tree.map_leaves(scaled, flat, spec)


def clip_grad_value(grads: Tree, max_value: float | Tensor) -> Tree:
    """Clamp every element of unscaled gradients to [-max_value, max_value].

    A NaN remains; `skip_step` drops it. Pure; safe under torch.compile and vmap; no sync.

    Args:
        grads: a pytree of floating-point gradients, after `unscale_and_check`; None passes through.
        max_value: a positive Python number, or a tensor of shape ().

    Returns:
        The clamped gradients.

    Raises:
        TypeError: a leaf is an integer or sparse tensor, or neither a tensor nor None; max_value is neither a number
            nor a tensor.
        ValueError: max_value is a number that is not positive, or a tensor of another shape.
        RuntimeError: a leaf is complex, which torch.clamp refuses.

    Example:
        >>> clip_grad_value([torch.tensor([3.0, -0.5])], 1.0)
        [tensor([ 1.0000, -0.5000])]

    References:
        `torch.nn.utils.clip_grad_value_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    flat, spec = _tree.parameters("clip_grad_value", "grads", grads)
    check_limit("clip_grad_value", "max_value", max_value)
    return _tree.map_leaves(lambda leaf: _clamp(leaf, max_value), flat, spec)


def check_limit(call: str, name: str, limit: object) -> None:
    """Raise TypeError or ValueError if a limit is neither a positive number nor a tensor of shape ()."""
    if isinstance(limit, Tensor):
        if limit.dim() != 0:
            raise ValueError(f"{call}: {name} must have shape (); got {tuple(limit.shape)}")
    elif not real(call, name, limit, "a number or a tensor") > 0:
        raise ValueError(f"{call}: {name} must be positive; got {limit}")


def _clamp(leaf: Tensor, max_value: float | Tensor) -> Tensor:
    """Clamp one gradient in its own dtype."""
    limit: Any = max_value.to(leaf.dtype) if isinstance(max_value, Tensor) else max_value
    return leaf.clamp(-limit, limit)


def _norm(across: Across | None, grads: list[Tensor]) -> Tensor:
    """Return the norm of tensors whose parts are on the same ranks; `across` is None if this rank has all of each."""
    norms = []
    for grad in grads:
        local_grad = local(grad)
        is_narrow = grad.is_floating_point() and grad.dtype.itemsize < 4
        norms.append(torch.linalg.vector_norm(local_grad, dtype=torch.float32 if is_narrow else None))
    local_norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if across is None:
        return local_norm
    return total(local_norm.square(), across).sqrt()


@dataclass(frozen=True)
class Clipping:
    """What `clip_by_norm` and `clip_by_value` return."""

    name: str
    limit: float | Tensor
    clipped: Callable[[Update, float | Tensor], Tree]
    """From an update and the limit to the clipped gradients."""

    def __repr__(self) -> str:
        return f"{self.name}({self.limit})"

    def __call__(self, update: Update) -> Update:
        return update._replace(gradients=self.clipped(update, self.limit))


def _clipped_by_norm(update: Update, max_norm: float | Tensor) -> Tree:
    norm = global_norm("clip_by_norm", update.gradients) if update.norm is None else update.norm
    return _scaled(update.gradients, max_norm, norm)


def _clipped_by_value(update: Update, max_value: float | Tensor) -> Tree:
    return clip_grad_value(update.gradients, max_value)


def clip_by_norm(max_norm: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that scales gradients so that their 2-norm is at most max_norm.

    grad = grad * min(1, max_norm / (norm + 1e-6)), as `clip_grad_norm`. The norm is that of the gradients that the part
    gets: inside `by_group` those of its group. As the first part of a training step's chain it takes the norm that the
    step has read already; anywhere else it reads the gradients once more. With a sharded state a part before it must
    leave zeros zero, since the padding of flat storage counts there. No sync.

    Args:
        max_norm: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_norm is neither a number nor a tensor.
        ValueError: max_norm is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_norm(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, 4.0])}, clipped.init(params))[0]
        {'w': tensor([-0.6000, -0.8000])}

    References:
        `torch.nn.utils.clip_grad_norm_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_norm", "max_norm", max_norm)
    return Clipping("clip_by_norm", max_norm, _clipped_by_norm)


def clip_by_value(max_value: float | Tensor) -> Callable[[Update], Update]:
    """Return a part of a chain that clamps every element of the gradients to [-max_value, max_value].

    As `clip_grad_value`. No sync.

    Args:
        max_value: a positive Python number, or a tensor of shape ().

    Returns:
        A function of an `Update`.

    Raises:
        TypeError: max_value is neither a number nor a tensor.
        ValueError: max_value is a number that is not positive, or a tensor of another shape.

    Example:
        >>> clipped = chain(clip_by_value(1.0), stateless(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> clipped.update(params, {"w": torch.tensor([3.0, -0.5])}, clipped.init(params))[0]
        {'w': tensor([-1.0000,  0.5000])}

    References:
        `torch.nn.utils.clip_grad_value_`, torch/nn/utils/clip_grad.py, PyTorch 2.13.
    """
    check_limit("clip_by_value", "max_value", max_value)
    return Clipping("clip_by_value", max_value, _clipped_by_value)
