"""The loop of torch's automatic mixed precision examples, with the model that checkpoints its blocks."""

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
        with torch.autocast(device, torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
        optimizer.zero_grad()
    return values(model), trace
