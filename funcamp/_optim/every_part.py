"""The part of a chain that lets another part act at some updates only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import integer
from funcamp._optim.part import (
    Part,
    Transform,
    Update,
    apply_part,
    check_part,
    check_state,
    evaluation_params_of,
    is_function,
    learning_rate_of,
)
from funcamp._types import Tree


class Every(NamedTuple):
    """The state of `every`."""

    updates: Tensor
    """int64, shape (): the updates so far."""
    state: Tree
    """The state of the part; `()` for one without."""


@dataclass(frozen=True)
class Delayed:
    """What `every` returns."""

    interval: int
    part: Part

    def __repr__(self) -> str:
        return f"every({self.interval}, {self.part!r})"

    def init(self, params: Tree) -> Every:
        """Return the part's state and a count of 0."""
        present = [leaf for leaf in _tree.leaves(params) if leaf is not None]
        device = present[0].device if present else None
        updates = torch.zeros((), dtype=torch.int64, device=device)
        part_state = () if is_function(self.part) else self.part.init(params)
        return Every(updates, part_state)

    def transform(self, update: Update, state: Every) -> tuple[Update, Every]:
        """Compute the part's update, and keep it at every interval-th call."""
        check_state(self, state, Every)
        part_update, part_state = apply_part(self.part, update, state.state)
        updates = state.updates + 1
        is_due = updates % self.interval == 0
        params = _select(is_due, "params", part_update.params, update.params)
        gradients = _select(is_due, "gradients", part_update.gradients, update.gradients)
        new_state = Every(updates, _select(is_due, "state", part_state, state.state))
        return update._replace(params=params, gradients=gradients), new_state

    def learning_rate(self, state: Every) -> Tree:
        """Return the part's learning rate; `()` if it has none."""
        return learning_rate_of(self.part, state.state)

    def evaluation_params(self, params: Tree, state: Every) -> Tree:
        """Return the parameters with which the part evaluates."""
        return evaluation_params_of(self.part, params, state.state)


def _select(condition: Tensor, name: str, new: Tree, old: Tree) -> Tree:
    """Return the new tree if the condition holds, else the old one; the old one itself if the new one is the same.

    Raises:
        ValueError: they differ in structure, in a None, or in a shape or dtype.
    """
    if new is old:
        return old
    _tree.same_structure("every", (f"the former {name}", f"the part's {name}"), (old, new))
    new_leaves, spec = _tree.flatten(new)
    selected: list[Tensor | None] = []
    for index, (new_leaf, old_leaf) in enumerate(zip(new_leaves, _tree.leaves(old))):
        if new_leaf is old_leaf:
            selected.append(new_leaf)
            continue
        if new_leaf is None or old_leaf is None or (new_leaf.shape, new_leaf.dtype) != (old_leaf.shape, old_leaf.dtype):
            raise ValueError(
                f"every: the part must keep the shapes and dtypes of {name}; at {_tree.path_of(new, index)} it has "
                f"{_tree.describe(new_leaf)} for {_tree.describe(old_leaf)}"
            )
        selected.append(torch.where(condition, new_leaf, old_leaf))
    return _tree.unflatten(selected, spec)


def every(interval: int, part: Any) -> Transform:
    """Return a part of a chain that acts at every interval-th update, and rests in between with its state.

    For a delayed actor or target network: `by_group({"critic": adam, "actor": chain(every(2, adam))})`. The first
    update that counts is number `interval`. The part is computed at every update and selected, without a sync; a
    skipped training step does not count.

    Args:
        interval: a positive integer.
        part: an optimizer or another part of a chain.

    Returns:
        A part of a chain, whose state is an `Every`: the number of updates and the part's state.

    Raises:
        TypeError: interval is not an integer, or part is no part of a chain.
        ValueError: interval is below 1.

    Example:
        >>> delayed = chain(every(2, stateless(torch.optim.SGD, lr=1.0)))
        >>> params, opt_state = {"w": torch.zeros(1)}, delayed.init({"w": torch.zeros(1)})
        >>> for _ in range(3):
        ...     params, opt_state = delayed.update(params, {"w": torch.ones(1)}, opt_state)
        >>> params
        {'w': tensor([-1.])}

    References:
        Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", 2018: the delayed actor.
    """
    interval = integer("every", "interval", interval, 1)
    check_part("every", "part", part)
    return Delayed(interval, part)
