"""All that these tests know of how a step is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import funcamp
from funcamp import ScalerConfig, numerics


def step_of(
    model: nn.Module,
    criterion: Callable[[Any, Any], Tensor],
    optimizer: Any,
    policy: str | None = "float16",
    scale: float = 2.0**18,
    *,
    tracked: bool = False,
    **options: Any,
) -> Any:
    """A step of a module whose scale grows every two steps."""
    loss_fn = funcamp.module_loss(model, criterion)
    if tracked:
        loss_fn = numerics.track_scales(loss_fn)
    config = ScalerConfig(init_scale=scale, growth_interval=2)
    return funcamp.make_train_step(loss_fn, optimizer, config, policy=policy, **options)
