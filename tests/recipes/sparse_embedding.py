"""The loop of torch's examples with two optimizers, one of them for the sparse gradient of an embedding."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, values
from tests.support.torch_loop import advance, scaler_for

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    sparse = torch.optim.SparseAdam(model[0].parameters(), lr=1e-2)
    dense = torch.optim.AdamW(model[2].parameters(), lr=1e-2, fused=True)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        words, target = recipe.batch(index, device)
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(words), target)
        scaler.scale(loss).backward()
        scaler.step(sparse)
        scaler.step(dense)
        trace.append(advance(scaler))
        model.zero_grad()
    return values(model), trace
