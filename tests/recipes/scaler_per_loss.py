"""Two of torch's scalers over one optimizer: each unscales the gradients of its own loss, which are kept and added."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, row_of, values
from tests.support.torch_loop import advance, scaler_for

TOLERANCE = 2.0**-16


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    torch.manual_seed(0)
    model = recipe.Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scalers, trace = [scaler_for(config, device) for config in recipe.CONFIGS], []
    for index in range(steps):
        with torch.autocast(device, torch.float16):
            losses = model(*recipe.batch(index, device))
        total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        for scaler, loss in zip(scalers, losses):
            scaler.scale(loss).backward(retain_graph=True)
            scaler.unscale_(optimizer)
            for name, value in model.named_parameters():
                if value.grad is not None:
                    total[name] += value.grad
            optimizer.zero_grad()
        for name, value in model.named_parameters():
            value.grad = total[name]
        # An overflow in either is one in the sum.
        if all(grad.isfinite().all() for grad in total.values()):
            optimizer.step()
        optimizer.zero_grad()
        trace.append(row_of(*map(advance, scalers)))
    return values(model), trace
