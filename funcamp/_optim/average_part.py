"""The part of a chain that averages parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from funcamp._optim.ema import check_decay, ema_update
from funcamp._optim.part import (
    Transform,
    Update,
    check_state,
)
from funcamp._storage.params import clone
from funcamp._types import Tree


class Average(NamedTuple):
    """The state of `average`."""

    average: Tree
    """The average of the parameters, laid out as they are."""


@dataclass(frozen=True)
class Averaging:
    """What `average` returns."""

    decay: float

    def __repr__(self) -> str:
        return f"average({self.decay})"

    def init(self, params: Tree) -> Average:
        """Return the parameters themselves, in memory of their own."""
        return Average(clone(params))

    def transform(self, update: Update, state: Average) -> tuple[Update, Average]:
        """Move the average toward the parameters."""
        check_state(self, state, Average)
        return update, Average(ema_update(state.average, update.params, self.decay))


def average(decay: float) -> Transform:
    """Return a part of a chain that keeps an exponential moving average of the parameters.

    average = average + (1 - decay) * (params - average), as `ema_update`, after the parts before it have moved the
    parameters: an optimizer comes first. The average begins as the parameters. It is a target network with polyak
    coefficient 1 - decay, too. In a training step `TrainState.ema` is the average. No sync.

    Args:
        decay: a Python number in [0, 1]; 0.999 averages over about a thousand steps.

    Returns:
        A part of a chain, whose state is an `Average`: a pytree with the field `average`.

    Raises:
        TypeError: decay is not a number.
        ValueError: decay is out of range.

    Example:
        >>> averaged = chain(stateless(torch.optim.SGD, lr=1.0), average(0.5))
        >>> params = {"w": torch.zeros(1)}
        >>> averaged.update(params, {"w": torch.ones(1)}, averaged.init(params))[1][1].average
        {'w': tensor([-0.5000])}

    References:
        `get_ema_multi_avg_fn`, torch/optim/swa_utils.py, PyTorch 2.13, which uses the same lerp.
    """
    check_decay("average", "decay", decay)
    return Averaging(decay)
