"""The loop of torch's examples with gradient accumulation; a window is divided by the number it really holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        micro_batches = list(zip(*recipe.batch(index, device)))
        for x, y in micro_batches:
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(model(x), y) / len(micro_batches)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
        optimizer.zero_grad()
    return values(model), trace
