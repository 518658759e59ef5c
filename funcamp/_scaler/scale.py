"""Scale the loss, unscale and check the gradients.

In one step:

    loss      scaled = loss * scale
    gradient  grad   = scaled_grad * f32(1 / f64(scale))
    flag      found_inf = 1 if found_inf != 0 or any grad is not finite
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._dtensor import any_in_meshes, local, sum_partials
from funcamp._scaler.state import ScalerState, check_state, reciprocal, replace
from funcamp._storage.params import Params, expand
from funcamp._types import Reduce, Tree


def scale(state: ScalerState, outputs: Tree) -> Tree:
    """Multiply every tensor of a pytree by the scale.

    scaled = output * scale, with torch's promotion: a float16 tensor of shape () becomes float32, one with dimensions
    stays float16. Pure; differentiable; safe under torch.compile and vmap; no sync.

    Args:
        state: the scaler's state.
        outputs: a loss, or a pytree of tensors; None passes through.

    Returns:
        The scaled pytree.

    Raises:
        TypeError: a leaf is neither a tensor nor None, or state is not a scaler state.
        ValueError: a leaf is on another type of device than the state.

    Example:
        >>> state = init(ScalerConfig(init_scale=8.0))
        >>> scale(state, {"loss": torch.tensor(0.5)})
        {'loss': tensor(4.)}

    References:
        `GradScaler.scale`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    state = check_state("scale", state)
    flat, spec = _tree.tensors("scale", "outputs", outputs)
    for index, leaf in enumerate(flat):
        if leaf is not None:
            _tree.check_device("scale", "outputs", outputs, index, leaf, state.scale.device)
    return _tree.unflatten(scaled_leaves(state, flat), spec)


def scaled_leaves(state: ScalerState, flat: list[Tensor | None]) -> list[Tensor | None]:
    """Multiply tensors by the scale. `funcamp.report` finds every scaled loss by this function's name."""
    products: list[Tensor | None] = []
    for leaf in flat:
        if leaf is None:
            products.append(None)
        else:
            products.append(_product(leaf, state.scale.to(leaf.device, non_blocking=True)))
    return products


def _product(leaf: Tensor, scale: Tensor) -> Tensor:
    # Beside a tensor with dimensions, vmap rounds the scale to its dtype before the product: 2^17 to inf in float16.
    is_low = leaf.is_floating_point() and leaf.dtype.itemsize < scale.dtype.itemsize
    if is_low and leaf.dim() and _upstream.transforms_active():
        return (leaf.to(scale.dtype) * scale).to(leaf.dtype)
    return leaf * scale


def unscale(state: ScalerState, tree: Tree) -> Tree:
    """Multiply every tensor of a pytree by the reciprocal of the scale, without checking it.

    unscaled = tensor * f32(1 / f64(scale)). Pure; differentiable, for gradient penalties; safe under torch.compile and
    vmap. No sync, except that an uncoalesced sparse tensor on CUDA is coalesced, which reads its size.

    Args:
        state: the state whose scale multiplied the loss.
        tree: a pytree of floating-point or complex tensors, strided or sparse COO; None passes through.

    Returns:
        The same tree. Dtypes narrower than float32 become float32, complex32 becomes complex64, others are unchanged.
        Sparse tensors are coalesced, with duplicates summed in float32 or wider.

    Raises:
        TypeError: a leaf is an integer tensor, neither strided nor sparse COO, or neither a tensor nor None.
        ValueError: a leaf is on another type of device than the state.

    Example:
        >>> state = init(ScalerConfig(init_scale=8.0))
        >>> unscale(state, [torch.tensor([4.0], dtype=torch.float16), None])
        [tensor([0.5000]), None]

    References:
        `GradScaler.unscale_`, torch/amp/grad_scaler.py, PyTorch 2.13, which also takes the reciprocal in float64.
    """
    state = check_state("unscale", state)
    flat, spec = _tree.gradients("unscale", "tree", tree, state.scale.device)
    inv_scale = reciprocal(state.scale)
    return _tree.map_leaves(lambda leaf: unscaled_leaf(leaf, inv_scale), flat, spec)


def unscale_and_check(state: ScalerState, grads: Tree, *, reduce: Reduce | None = None) -> tuple[Tree, ScalerState]:
    """Unscale gradients and record in `found_inf` whether any of them is non-finite.

    grad = scaled_grad * f32(1 / f64(scale)); found_inf = 1 if found_inf != 0 or any grad is not finite, else 0. The
    check is on the product: a gradient that is finite before unscaling and overflows by it (a scale below 1, or 0)
    counts too; torch would step on it. A finite sum of sparse duplicates is finite here even if it exceeds float16.
    Pure; safe under torch.compile and vmap. No sync, except `unscale`'s for uncoalesced sparse tensors.

    Args:
        state: the state whose scale multiplied the loss; never the updated one.
        grads: a pytree of floating-point or complex gradients; None passes through, an empty tree sets no flag.
        reduce: a pure function of the flag, float32, shape (), that returns a tensor of shape (), nonzero if found: for
            example a MAX over ranks. Called once, whatever the number of gradients.

    Returns:
        The unscaled gradients, as `unscale` returns them, and the state with its flag.

    Raises:
        TypeError: a leaf is an integer tensor, neither strided nor sparse COO, or neither a tensor nor None; reduce
            does not return a tensor.
        ValueError: every leaf is None, without reduce (another rank may have gradients); a leaf is on another type of
            device than the state; reduce returns another shape.

    Example:
        >>> state = init(ScalerConfig(init_scale=8.0))
        >>> grads, state = unscale_and_check(state, {"w": torch.tensor([4.0, float("inf")])})
        >>> grads["w"], state.found_inf
        (tensor([0.5000,    inf]), tensor(1.))

    References:
        `_amp_foreach_non_finite_check_and_unscale_`, aten/src/ATen/native/cuda/AmpKernels.cu, PyTorch 2.13.
    """
    state = check_state("unscale_and_check", state)
    flat, spec = _tree.gradients("unscale_and_check", "grads", grads, state.scale.device)
    inv_scale = reciprocal(state.scale)
    if reduce is None and flat and all(leaf is None for leaf in flat):
        raise ValueError(
            f"unscale_and_check: grads must hold a gradient; got None for all of its {len(flat)} leaves: call "
            "backward() before, or leave the step out"
        )
    unscaled_grads = [None if grad is None else unscaled_leaf(sum_partials(grad), inv_scale) for grad in flat]
    is_found = state.found_inf != 0
    finite_flags = [_is_finite(grad).to(is_found.device) for grad in unscaled_grads if grad is not None]
    if finite_flags:
        is_found = is_found | ~torch.stack(finite_flags).all()
    found_inf = any_in_meshes(is_found, unscaled_grads).float()
    if reduce is not None:
        found_inf = _reduced(reduce, found_inf)
    return _tree.unflatten(unscaled_grads, spec), replace(state, found_inf=found_inf)


def all_finite(tree: Tree) -> Tensor:
    """Return whether every element of a pytree of tensors is finite.

    A complex number is finite if both parts are. Integers and an empty tree are finite. Pure; safe under torch.compile
    and vmap. No sync, except `unscale`'s for uncoalesced sparse tensors.

    Args:
        tree: a pytree of tensors on one device; None passes through.

    Returns:
        A bool tensor, shape ().

    Raises:
        TypeError: a leaf is neither a tensor nor None.

    Example:
        >>> all_finite({"a": torch.ones(2), "b": None}), all_finite(torch.tensor(float("nan")))
        (tensor(True), tensor(False))
    """
    flat, _ = _tree.tensors("all_finite", "tree", tree)
    leaves = [sum_partials(leaf) for leaf in flat if leaf is not None]
    if not leaves:
        return torch.ones((), dtype=torch.bool)
    finite_flags = [_is_finite(leaf) for leaf in leaves]
    return ~any_in_meshes(~torch.stack(finite_flags).all(), leaves)


def found_inf_by_leaf(grads: Tree) -> Tensor:
    """Return, per leaf, whether it contains a non-finite value.

    Reads the gradients once more, with one reduction per leaf. Pure; safe under torch.compile and vmap; no sync.

    Args:
        grads: a pytree of tensors on one device, as `unscale_and_check` returns it, or `Params`; None is skipped.

    Returns:
        A bool tensor, shape (leaves,), in the order of `leaf_names`.

    Raises:
        TypeError: a leaf is neither a tensor nor None.

    Example:
        >>> grads = {"w": torch.ones(2), "b": torch.tensor([1.0, float("inf")])}
        >>> flags = found_inf_by_leaf(grads)
        >>> flags, [name for name, found in zip(leaf_names(grads), flags.tolist()) if found]
        (tensor([False,  True]), ['b'])
    """
    flat, _ = _tree.tensors("found_inf_by_leaf", "grads", expand(grads))
    leaves = [sum_partials(leaf) for leaf in flat if leaf is not None]
    if not leaves:
        return torch.zeros(0, dtype=torch.bool)
    return any_in_meshes(torch.stack([~_is_finite(leaf) for leaf in leaves]), leaves)


def leaf_names(tree: Tree) -> tuple[str, ...]:
    """Return the dotted names of a tree's leaves, in the order of the flags of `found_inf_by_leaf`.

    Reads no tensor values; no sync.

    Args:
        tree: a pytree of tensors or `Params`; None is skipped.

    Returns:
        One name per tensor.

    Raises:
        TypeError: a leaf is neither a tensor nor None.

    Example:
        >>> leaf_names({"layer": {"weight": torch.ones(2), "bias": None}})
        ('layer.weight',)
    """
    # Without views: flat storage with a batch dimension has none.
    tree = _tree.map_nodes(Params, lambda node: node.placeholders(), tree)
    flat, _ = _tree.tensors("leaf_names", "tree", tree)
    return tuple(name for name, leaf in zip(_tree.names(tree), flat) if leaf is not None)


def unscaled_leaf(leaf: Tensor, inv_scale: Tensor) -> Tensor:
    """Multiply a gradient by inv_scale, in float32 or wider."""
    inv_scale = inv_scale.to(leaf.device, non_blocking=True)
    if leaf.layout == torch.sparse_coo:
        leaf = _widened(leaf).coalesce()
        values = leaf.values() * inv_scale
        return torch.sparse_coo_tensor(leaf.indices(), values, leaf.shape, is_coalesced=True, check_invariants=False)
    return _widened(leaf) * inv_scale


def _widened(leaf: Tensor) -> Tensor:
    """Return a leaf in float32 or complex64 if it is narrower."""
    if leaf.dtype == torch.complex32:
        return leaf.to(torch.complex64)
    if leaf.is_floating_point() and leaf.dtype.itemsize < 4:
        return leaf.float()
    return leaf


def _is_finite(leaf: Tensor) -> Tensor:
    """Return whether this rank's part of a leaf is finite."""
    if leaf.layout == torch.sparse_coo:
        # Widened, because a sum of duplicates may exceed float16.
        leaf = _widened(leaf).coalesce().values()
    values = local(leaf)
    if not values.is_floating_point() or values.numel() == 0 or values.dtype.itemsize == 1:  # no maximum of float8
        return torch.isfinite(values).all()
    # A tensor is finite if its largest element is: in an eager step a third of the time of a flag for each element.
    return torch.isfinite(values.abs().amax())


def _reduced(reduce: Reduce, flag: Tensor) -> Tensor:
    """Return the flag after reduce, checked, as 0 or 1."""
    reduced_flag = reduce(flag)
    rule = "unscale_and_check: reduce must return a tensor of shape ()"
    if not isinstance(reduced_flag, Tensor):
        raise TypeError(f"{rule}; got {reduced_flag!r}")
    if reduced_flag.dim() != 0:
        raise ValueError(f"{rule}; got {tuple(reduced_flag.shape)}")
    return (reduced_flag != 0).float()
