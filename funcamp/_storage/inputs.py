"""The parameters that a state stores and a loss gets: laid out and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._storage.layout import arrange
from funcamp._storage.params import Params, clone, expand, repeated_name
from funcamp._types import Tree


class KnowsNames(Protocol):
    """What a loss knows of its parameters (`_autograd.loss.Loss`)."""

    @property
    def names(self) -> dict[str, str] | None:
        """Each name under which the module has a parameter, with the stored name; None for a loss without a module."""
        ...

    @property
    def uncast_names(self) -> frozenset[str]:
        """The stored names of the parameters that autocast does not cast, such as those of embeddings."""
        ...

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes that the loss knows, by stored name."""
        ...


def lay_out(
    call: str,
    params: Tree,
    loss_fn: KnowsNames,
    group: Callable[[str, Tensor], str],
    *,
    flat: bool = True,
    buckets: int = 1,
    consume: bool = False,
) -> Params:
    """Return the parameters as a state stores them, in separate memory.

    Args:
        call: the public function, for errors.
        params: a pytree of tensors, or `Params`.
        loss_fn: the loss that gets them. Flat storage puts the parameters that autocast does not cast into separate
            groups, so that it casts all matrices of another group, and a compiled step can cast them at once.
        group: the label of a leaf, as in `ravel`.
        flat: whether a group is a one-dimensional tensor.
        buckets: the number of consecutive parts of flat storage.
        consume: whether the given tensors get the state's memory too, instead of separate memory.

    Raises:
        TypeError: a parameter is in float16.
    """
    params = expand(params)
    leaves, _ = _tree.parameters(call, "params", params)
    _check_dtypes_and_shapes(call, _tree.names(params), leaves, {})  # before they are consumed
    uncast_names = loss_fn.uncast_names

    def apart(name: str, _: Tensor) -> object:
        return name in uncast_names

    layout, tensors = arrange(call, params, group, apart, buckets, flat=flat)
    if consume:
        return Params(layout.take(tensors), layout)
    # A flat group is a copy by itself; a group that is one tensor is that tensor.
    return Params(layout.join(tensors if flat else clone(tensors)), layout)


def check_params(call: str, params: Params, loss_fn: KnowsNames) -> None:
    """Raise if stored parameters, in full, are not those of a loss.

    Raises:
        ValueError: the parameters have other names or shapes than the loss knows, or one name twice.
        TypeError: a parameter is in float16.
    """
    tree = params.tree()
    leaves, _ = _tree.parameters(call, "params", tree)
    names = _tree.names(tree)
    repeated = repeated_name(names)
    if repeated is not None:
        raise ValueError(f"{call}: every leaf of params must have a unique dotted name; got {repeated!r} twice")
    stored_names = loss_fn.names
    if stored_names is not None and set(names) != set(stored_names.values()):
        differing_names = set(names) ^ set(stored_names.values())
        raise ValueError(
            f"{call}: params must have the names of {loss_fn!r}'s params(); they differ in {min(differing_names)!r}"
        )
    _check_dtypes_and_shapes(call, names, leaves, loss_fn.shapes())


def _check_dtypes_and_shapes(
    call: str, names: list[str], leaves: list[Tensor | None], shapes: dict[str, torch.Size]
) -> None:
    """Raise if a parameter is float16, as torch's scaler does, or has another shape than the module's."""
    for name, leaf in zip(names, leaves):
        if leaf is None:
            continue
        if leaf.dtype in (torch.float16, torch.complex32):
            raise TypeError(
                f"{call}: params[{name!r}] must not be float16, which rounds most updates of a step to nothing; got "
                f"{_tree.describe(leaf)}: keep it in float32, model.float() (autocast casts it at its use), or "
                "freeze it"
            )
        if shapes.get(name, leaf.shape) != leaf.shape:
            raise ValueError(
                f"{call}: params[{name!r}] must have the shape of the module's, {tuple(shapes[name])}; got "
                f"{tuple(leaf.shape)}"
            )
