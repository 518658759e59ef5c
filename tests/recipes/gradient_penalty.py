"""The gradient penalty of torch's automatic mixed precision examples."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, values
from tests.support.torch_loop import Scaled

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaled, trace = Scaled(optimizer, recipe.CONFIG, device), []
    for index in range(steps):
        x, y = recipe.batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaled_grads = torch.autograd.grad(
            outputs=scaled.scaler.scale(loss), inputs=model.parameters(), create_graph=True
        )
        inv_scale = 1.0 / scaled.scaler.get_scale()
        grads = [grad * inv_scale for grad in scaled_grads]
        with torch.autocast(device, torch.float16):
            norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
            loss = loss + recipe.WEIGHT * norm
        trace.append(scaled.take(loss))
    return values(model), trace
