"""Which leaf of a tree of gradients is not finite: flags as a tensor, names on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._distributed.dtensor import agreed, local, settled_sum
from funcamp._scaler.scale import all_finite
from funcamp._types import Tree


def found_inf_by_leaf(grads: Tree) -> Tensor:
    """Tell of every leaf whether it holds a value that is not finite.

    One reading of the gradients more, a reduction a leaf. Pure; safe under torch.compile and vmap; no sync.

    Args:
        grads: a pytree of tensors on one device, as `unscale_and_check` returns it, or a `FlatParams`; None is skipped.

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
    flat, _ = _tree.tensors("found_inf_by_leaf", "grads", _tree.expand(grads))
    leaves = [settled_sum(leaf) for leaf in flat if leaf is not None]
    if not leaves:
        return torch.zeros(0, dtype=torch.bool)
    return agreed(torch.stack([~all_finite(local(leaf)) for leaf in leaves]), leaves)


def leaf_names(tree: Tree) -> tuple[str, ...]:
    """The dotted names of a tree's leaves: on the host, beside the flags of `found_inf_by_leaf`.

    Reads no tensor; no sync.

    Args:
        tree: a pytree of tensors or a `FlatParams`; None is skipped.

    Returns:
        A name for every tensor.

    Raises:
        TypeError: a leaf is neither a tensor nor None.

    Example:
        >>> leaf_names({"layer": {"weight": torch.ones(2), "bias": None}})
        ('layer.weight',)
    """
    tree = _tree.map_nodes(_tree.Stored, lambda node: node.placeholders(), tree)  # no views: a batch of states has none
    flat, _ = _tree.tensors("leaf_names", "tree", tree)
    return tuple(name for name, leaf in zip(_tree.names(tree), flat) if leaf is not None)
