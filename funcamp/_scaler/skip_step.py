"""The skipped step: the old value of every leaf, without a branch."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._scaler.state import ScalerState, check_state
from funcamp._types import Tree


def skip_step(state: ScalerState, *, new: Tree, old: Tree) -> Tree:
    """Select, leaf by leaf, the old value if a non-finite gradient was found and the new one otherwise.

    leaf = old if found_inf != 0 else new; a leaf that is the same object in both is returned as it is. Both trees are
    computed; there is no branch. A leaf requires a gradient only if its new value does: not after an optimizer's
    update, also if the old value is a module's parameter. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state that `unscale_and_check` or `scaled_grad_and_value` returned, before `update`. Only this
            one has the flag: with the state of before, a gradient that is not finite is applied.
        new: a pytree after the step: parameters, optimizer state, anything the step changed.
        old: the same pytree before the step.

    Returns:
        The selected pytree. None and equal Python values pass through.

    Raises:
        ValueError: new and old differ in structure, or two leaves differ in shape, dtype or device.
        TypeError: a leaf is a sparse tensor, an array of numpy, or a Python value that differs between new and old.

    Example:
        >>> _, state = unscale_and_check(init(), torch.tensor(float("inf")))
        >>> skip_step(state, new={"w": torch.ones(2)}, old={"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    state = check_state("skip_step", state)
    return old_where("skip_step", state.found_inf != 0, new, old)


def old_where(call: str, condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Return, leaf by leaf, the old value if a condition (bool, shape ()) holds, else the new one; see `skip_step`."""
    _tree.same_structure(call, ("new", "old"), (new, old))
    flat_new, spec = _tree.flatten(new)
    selected = []
    for index, (new_leaf, old_leaf) in enumerate(zip(flat_new, _tree.leaves(old))):
        selected.append(_select(call, new, index, condition, new_leaf, old_leaf))
    return _tree.unflatten(selected, spec)


def _select(call: str, tree: Tree, index: int, condition: Tensor, new: object, old: object) -> object:
    """Return the old leaf if the condition holds and the new one otherwise.

    Args:
        call: the call, for messages.
        tree: the new tree, for messages.
        index: the leaf's position in it.
        condition: bool, shape ().
        new: the leaf after the step.
        old: the leaf before the step.

    Raises:
        TypeError, ValueError: as in `skip_step`.
    """
    if new is old:
        return new
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
            raise ValueError(
                f"{call}: new{_tree.path_of(tree, index)} must have the shape, dtype and device of old; "
                f"got {_tree.describe(new)} against {_tree.describe(old)}"
            )
        if new.layout != torch.strided or old.layout != torch.strided:
            raise TypeError(f"{call}: new{_tree.path_of(tree, index)} must be strided; got layout {new.layout}")
        _tree.check_device(call, "new", tree, index, new, condition.device)
        if old.requires_grad and not new.requires_grad and not _upstream.transforms_active():
            old = old.detach()  # else the graph would grow with the steps
        return torch.where(condition.to(new.device, non_blocking=True), old, new)
    if isinstance(new, Tensor) or isinstance(old, Tensor) or _is_array(new) or _is_array(old) or new != old:
        raise TypeError(
            f"{call}: new{_tree.path_of(tree, index)} must be a tensor in both trees, or an equal value; "
            f"got {_tree.describe(new)} against {_tree.describe(old)} in old"
        )
    return new


def _is_array(leaf: object) -> bool:
    """Return whether a leaf is an array with dimensions, whose comparison gives an array and no bool."""
    return getattr(leaf, "shape", ()) != ()
