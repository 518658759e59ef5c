"""The options of a training step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._autograd.loss import Loss
from funcamp._optim.average import average
from funcamp._optim.chain import Chain, chain
from funcamp._optim.clip import clip_by_norm, clip_by_value
from funcamp._scaler.config import ScalerConfig
from funcamp._step.parallel import Parallel
from funcamp._step.shares import Weight
from funcamp._types import Tree


class Options(NamedTuple):
    """The arguments of `make_train_step`, checked."""

    policy: torch.dtype
    """The dtype of autocast around the loss; float32 for none."""
    max_norm: float | Tensor | None
    max_value: float | Tensor | None
    accumulate: int
    weight: Weight | None
    ema_decay: float | None
    parallel: Parallel
    observe: Mapping[str, Callable[[Tree], Tree]]


def chain_of(optimizer: object, options: Options) -> Chain:
    """Return the chain of an optimizer and of what clips before it and averages after it."""
    parts = [optimizer]
    if options.max_norm is not None:
        parts.insert(0, clip_by_norm(options.max_norm))
    if options.max_value is not None:
        parts.insert(0, clip_by_value(options.max_value))
    if options.ema_decay is not None:
        parts.append(average(options.ema_decay))
    return chain(*parts)


def lines_to_agree_on(
    loss_fn: Loss, optimizer: object, config: ScalerConfig, options: Options, flat: bool
) -> list[str]:
    """Return lines that describe how the state changes, equal in processes with equal options."""
    values: dict[str, object] = {f"{name} of ScalerConfig": value for name, value in vars(config).items()}
    values["optimizer"] = optimizer
    values["keep_buffers"] = loss_fn.keep_buffers
    values["flat"] = flat
    values["weight"] = None if options.weight is None else "given"
    values["observe"] = list(options.observe)
    for name in ("policy", "max_norm", "max_value", "accumulate", "ema_decay"):
        values[name] = getattr(options, name)
    return [f"{name} is {_ADDRESS.sub('', repr(value))}" for name, value in values.items()]


#: An object's address in a repr, or the index of a tensor's device: they differ between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):[0-9]+(?=')")
