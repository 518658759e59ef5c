"""What a training step is made of, beside its loss, its optimizer and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from funcamp._grad import Engine
from funcamp._policy import Policy
from funcamp._spread import Alone
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
