"""The loop of torch's examples with a model that holds more than matrices; torch keeps a skipped step's buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, dict[str, Tensor]], Trace]:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    torch.manual_seed(1)
    for index in range(steps):
        x, y = recipe.batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
        optimizer.zero_grad()
    return {"params": values(model), "buffers": dict(model.named_buffers())}, trace
