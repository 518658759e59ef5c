"""The loop of torch's automatic mixed precision examples with clipped gradients: unscale, clip, step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 2.0**-16  # the norm is summed in float64, in float32 by torch: a last bit of every gradient


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Any:
        return recipe.criterion(model(x), y)

    trace = amp_loop(recipe, optimizer, steps, device, loss_of, max_norm=recipe.MAX_NORM)
    return values(model), trace
