"""An exponential moving average of parameters."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import real
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
        TypeError: a leaf is an integer or sparse tensor, neither a tensor nor None, or None in one tree only; decay is
            not a number.
        ValueError: the trees differ in structure, or two leaves in shape, dtype or device; decay is out of range.

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
    new_average = []
    with contextlib.nullcontext() if _upstream.transforms_active() else torch.no_grad():
        for index, (old, param) in enumerate(zip(flat_average, flat_params)):
            _check_alike(params, index, param, old)
            new_average.append(None if old is None or param is None else torch.lerp(old, param, weight))
    return _tree.unflatten(new_average, spec)


def _check_alike(params: Tree, index: int, param: Tensor | None, old: Tensor | None) -> None:
    """Raise TypeError or ValueError if torch.lerp would broadcast or refuse a parameter and its average."""
    if param is None and old is None:
        return
    rule = "be a tensor in both trees, or None in both"
    error: type[Exception] = TypeError
    if param is not None and old is not None:
        if param.shape == old.shape and param.dtype == old.dtype and param.device == old.device:
            return
        rule, error = "have the shape, dtype and device of average", ValueError
    raise error(
        f"ema_update: params{_tree.path_of(params, index)} must {rule}; "
        f"got {_tree.describe(param)} against {_tree.describe(old)} in average"
    )


def check_decay(call: str, name: str, decay: object) -> None:
    """Raise TypeError or ValueError if a decay is not a number in [0, 1]."""
    if not 0 <= real(call, name, decay) <= 1:
        raise ValueError(f"{call}: {name} must be from 0 to 1; got {decay}")
