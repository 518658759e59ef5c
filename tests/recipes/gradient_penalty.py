"""The gradient penalty of torch's automatic mixed precision examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        x, y = recipe.batch(index, device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaled_grads = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
        inv_scale = 1.0 / scaler.get_scale()
        grads = [grad * inv_scale for grad in scaled_grads]
        with torch.autocast(device, torch.float16):
            norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
            loss = loss + recipe.WEIGHT * norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
    return values(model), trace
