"""SAM with torch.amp.GradScaler: the first gradient is unscaled by hand, for a scaler unscales once in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Outcome, values
from tests.support.torch_loop import advance, scaler_for

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=recipe.LR, momentum=0.9)
    scaler, trace = scaler_for(recipe.CONFIG, device), []

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(x), y)
        scaler.scale(loss).backward()

    for index in range(steps):
        x, y = recipe.batch(index, device)
        backward(x, y)
        inverse = 1.0 / scaler.get_scale()
        grads = [param.grad * inverse for param in params if param.grad is not None]
        # An overflow of the first pass stays in .grad: step finds it, skips, and update backs off, once.
        if all(grad.isfinite().all() for grad in grads):
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            before = [param.detach().clone() for param in params]
            with torch.no_grad():
                for param, grad in zip(params, grads):
                    param.add_(grad * (recipe.RHO / (norm + 1e-12)))
            backward(x, y)
            with torch.no_grad():
                for param, value in zip(params, before):
                    param.copy_(value)
        scaler.step(optimizer)
        trace.append(advance(scaler))
    return values(model), trace
