"""The loop of torch's automatic mixed precision examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 2.0**-13


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        x, y = recipe.batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
        optimizer.zero_grad()
    return values(model), trace
