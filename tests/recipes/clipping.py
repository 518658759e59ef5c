"""The loop of torch's automatic mixed precision examples with clipped gradients: unscale, clip, step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.recipes import Trace, amp_loop, values

TOLERANCE = 2.0**-16  # the norm is summed in float64, in float32 by torch: a last bit of every gradient


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)

    def clip(scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.MAX_NORM)

    trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: recipe.criterion(model(x), y), unscaled=clip)
    return values(model), trace
