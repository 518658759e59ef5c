"""What a training step is made of, beside its loss, its optimizer and its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from funcamp._autograd.scaled_grad import Engine
from funcamp._scaler.config import ScalerConfig
from funcamp._step.data_parallel import Alone
from funcamp._storage.policy import Policy
from funcamp._types import Reduce


class Options(NamedTuple):
    """The arguments of `make_train_step`, checked."""

    policy: Policy
    max_norm: float | Tensor | None
    max_value: float | Tensor | None
    accumulate: int
    scan: bool
    reduce: Reduce | None
    ema_decay: float | None
    has_aux: bool
    has_buffers: bool
    keep_buffers: bool
    has_scaler: bool
    engine: Engine | None
    found_inf_by_leaf: bool
    probes: tuple[str, ...]
    flat: bool
    group: Callable[[str, Tensor], str]
    parallel: Alone


def described(optimizer: Any, config: ScalerConfig, options: Options) -> list[str]:
    """What decides how the state changes, a line each, the same in every process that was given the same."""
    known = {f"{field.name} of ScalerConfig": getattr(config, field.name) for field in fields(config)}
    known["optimizer"] = optimizer
    for name in ("policy", "max_norm", "max_value", "accumulate", "ema_decay", "keep_buffers", "flat"):
        known[name] = getattr(options, name)
    return [f"{name} is {_PLACE.sub('', repr(value))}" for name, value in known.items()]


#: Where an object or a tensor lies, in its repr: the process's own.
_PLACE = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):[0-9]+(?=')")
