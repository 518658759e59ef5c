"""The loop of torch's automatic mixed precision examples with clipped gradients: unscale, clip, step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 2.0**-16  # the norm is summed in float64, in float32 by torch: a last bit of every gradient


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    return clipped(recipe, steps, device, lambda params: nn.utils.clip_grad_norm_(params, recipe.MAX_NORM))


def clipped(recipe: Any, steps: int, device: str, clip: Any) -> tuple[dict[str, Tensor], Trace]:
    """The loop with any clip of unscaled gradients."""
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        x, y = recipe.batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters())
        scaler.step(optimizer)
        trace.append(advance(scaler))
        optimizer.zero_grad()
    return values(model), trace
