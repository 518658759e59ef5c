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
    evaluation_params_of,
    first_state,
    learning_rate_of,
)
from funcamp._scaler.skip_step import old_where
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
        present = _tree.tensors_in(params)
        updates = torch.zeros((), dtype=torch.int64, device=present[0].device if present else None)
        return Every(updates, first_state(self.part, params))

    def transform(self, update: Update, state: Every) -> tuple[Update, Every]:
        """Compute the part's update, and keep it at every interval-th call."""
        part_update, part_state = apply_part(self.part, update, state.state)
        updates = state.updates + 1
        new = (part_update.params, part_update.gradients, part_state)
        old = (update.params, update.gradients, state.state)
        params, gradients, part_state = old_where("every", updates % self.interval != 0, new, old)
        return update._replace(params=params, gradients=gradients), Every(updates, part_state)

    def learning_rate(self, state: Every) -> Tree:
        """Return the part's learning rate; `()` if it has none."""
        return learning_rate_of(self.part, state.state)

    def evaluation_params(self, params: Tree, state: Every) -> Tree:
        """Return the parameters with which the part evaluates."""
        return evaluation_params_of(self.part, params, state.state)


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
