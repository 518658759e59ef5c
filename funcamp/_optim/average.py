"""An exponential moving average of parameters: a function, and a part of a chain."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import real
from funcamp._optim.part import Transform, Update
from funcamp._storage.params import clone
from funcamp._types import Tree


def ema_update(average: Tree, params: Tree, decay: float) -> Tree:
    """Move an average toward the parameters.

    average = average + (1 - decay) * (params - average). The result does not require a gradient, unless torch.func
    differentiates. Pure; safe under torch.compile and vmap; no sync.

    Args:
        average: a pytree of floating-point or complex tensors; initially the parameters. None passes through.
        params: the same tree after the step, with average's shapes, dtypes and devices.
        decay: a Python number in [0, 1]; 0.999 averages over about a thousand steps.

    Returns:
        The new average.

    Raises:
        TypeError: a leaf is an integer or sparse tensor, or neither a tensor nor None; decay is not a number.
        ValueError: the trees differ in structure, or two leaves in shape, dtype or device, or one is None; decay is out
            of range.

    Example:
        >>> ema_update({"w": torch.zeros(1)}, {"w": torch.ones(1)}, 0.75)
        {'w': tensor([0.2500])}

    References:
        `get_ema_multi_avg_fn`, torch/optim/swa_utils.py, PyTorch 2.13, which uses the same lerp.
    """
    check_decay("ema_update", "decay", decay)
    _tree.same_structure("ema_update", ("average", "params"), (average, params))
    flat_average, spec = _tree.parameters("ema_update", "average", average)
    flat_params, _ = _tree.parameters("ema_update", "params", params)
    weight = 1 - float(decay)
    new_average: list[Tensor | None] = []
    with contextlib.nullcontext() if _upstream.transforms_active() else torch.no_grad():
        for index, (old, param) in enumerate(zip(flat_average, flat_params)):
            if _kind(old) != _kind(param):
                raise ValueError(
                    f"ema_update: params{_tree.path_of(params, index)} must have the shape, dtype and device of "
                    f"average; got {_tree.describe(param)} against {_tree.describe(old)} in average"
                )
            new_average.append(None if old is None or param is None else torch.lerp(old, param, weight))
    return _tree.unflatten(new_average, spec)


def _kind(tensor: Tensor | None) -> object:
    """Return what torch.lerp would broadcast or refuse if two tensors differ in it."""
    return tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def check_decay(call: str, name: str, decay: object) -> None:
    """Raise TypeError or ValueError if a decay is not a number in [0, 1]."""
    if not 0 <= real(call, name, decay) <= 1:
        raise ValueError(f"{call}: {name} must be from 0 to 1; got {decay}")


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
        return update, Average(ema_update(state.average, update.params, self.decay))


def average(decay: float) -> Transform:
    """Return a part of a chain that keeps an exponential moving average of the parameters.

    average = average + (1 - decay) * (params - average), as `ema_update`, after the parts before it have moved the
    parameters: an optimizer comes first. The average begins as the parameters. It is a target network with polyak
    coefficient 1 - decay, too. In a training step `TrainState.ema` is the average, which must be a part of the
    optimizer's outermost chain, or delayed there by `every`. No sync.

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
