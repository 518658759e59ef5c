"""torch's automatic mixed precision examples, "Working with Multiple Models, Losses, and Optimizers"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.recipes import Outcome, values
from tests.support.torch_loop import scaler_for

TOLERANCE = 2.0**-16


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model0, model1 = (model.to(device) for model in recipe.make_models())
    optimizer0 = torch.optim.AdamW(model0.parameters(), lr=1e-2)
    optimizer1 = torch.optim.SGD(model1.parameters(), lr=1e-3)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        x, y0, y1 = recipe.batch(index, device)
        optimizer0.zero_grad()
        optimizer1.zero_grad()
        with torch.autocast(device, torch.float16):
            output0, output1 = model0(x), model1(x)
            loss0 = mse_loss(2 * output0 + 3 * output1, y0)
            loss1 = mse_loss(3 * output0 - 5 * output1, y1)
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()
        scaler.step(optimizer0)
        scaler.step(optimizer1)
        trace.append((scaler.get_scale(), [found_inf(scaler, optimizer0), found_inf(scaler, optimizer1)]))
        scaler.update()
    return [values(model0), values(model1)], trace


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> float:
    """What the scaler decided about one optimizer, which it has no public name for."""
    flags: list[Tensor] = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return float(sum(flag.item() for flag in flags) > 0)
