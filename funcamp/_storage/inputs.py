"""The parameters that a state stores and a loss gets: laid out and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._storage.layout import arrange
from funcamp._storage.params import Params, clone, expand, repeated_name
from funcamp._types import Tree


def lay_out(
    call: str,
    params: Tree,
    group: Callable[[str, Tensor], str],
    *,
    uncast_names: AbstractSet[str],
    flat: bool,
    buckets: int,
) -> Params:
    """Return the parameters as a state stores them, in separate memory.

    Args:
        call: the public function, for errors.
        params: a pytree of tensors, or `Params`.
        group: the label of a leaf, as in `ravel`.
        uncast_names: the parameters that autocast does not cast. Flat storage puts them into separate groups, so that
            it casts all matrices of another group, and a compiled step can cast them at once.
        flat: whether a group is a one-dimensional tensor.
        buckets: the number of consecutive parts of flat storage.
    """
    params = expand(params)
    layout, tensors = arrange(call, params, group, uncast_names, buckets, flat=flat)
    # A flat group is a copy by itself; a group that is one tensor is that tensor.
    return Params(layout.join(tensors if flat else clone(tensors)), layout)


def check_params(call: str, params: Params, shapes: Mapping[str, torch.Size] | None) -> None:
    """Raise if stored parameters are not those of a loss. Reads no values, and makes no views.

    Args:
        call: the public function, for errors.
        params: the parameters.
        shapes: the shape of each parameter that the loss takes, by stored name; None if the loss does not know them.

    Raises:
        ValueError: the parameters have other names or shapes than the loss knows, or one name twice.
        TypeError: a parameter is in float16.
    """
    tree = params.placeholders()
    leaves, _ = _tree.parameters(call, "params", tree)
    names = _tree.names(tree)
    repeated = repeated_name(names)
    if repeated is not None:
        raise ValueError(f"{call}: every leaf of params must have a unique dotted name; got {repeated!r} twice")
    if shapes is not None and (differing_names := set(names) ^ set(shapes)):
        raise ValueError(
            f"{call}: params must have the names of the module's, loss_fn.params(); they differ in "
            f"{min(differing_names)!r}"
        )
    shapes = shapes or {}
    for name, leaf in zip(names, leaves):
        if leaf is not None and leaf.dtype in (torch.float16, torch.complex32):
            raise TypeError(
                f"{call}: params[{name!r}] must not be float16, which rounds most updates of a step to nothing; got "
                f"{_tree.describe(leaf)}: keep it in float32, model.float() (autocast casts it at its use), or "
                "freeze it"
            )
        shape = None if leaf is None else tuple(leaf.shape)
        if name in shapes and tuple(shapes[name]) != shape:
            raise ValueError(
                f"{call}: params[{name!r}] must have the shape of the module's, {tuple(shapes[name])}; got {shape}"
            )
