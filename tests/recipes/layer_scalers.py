"""A torch.amp.GradScaler and an optimizer for each block; backward() block by block, over detached inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Outcome
from tests.support.torch_loop import scaler_for

TOLERANCE = 2.0**-16


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    params = recipe.make_params(device)
    leaves = [[value.requires_grad_() for value in own.values()] for own in params]
    optimizers = [torch.optim.Adam(own, lr=1e-3) for own in leaves]
    scalers, trace = [scaler_for(config, device) for config in recipe.CONFIGS], []
    for index in range(steps):
        x, y = recipe.batch(index, device)
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for block, own in zip(recipe.BLOCKS, params):
            inputs.append(x.detach().requires_grad_(bool(inputs)))
            with torch.autocast(device, torch.float16):
                x = block(own, inputs[-1])
            outputs.append(x)
        (grad,) = torch.autograd.grad(torch.nn.functional.mse_loss(x, y), x)
        scales = [scaler.scale(torch.ones((), device=device)).item() for scaler in scalers]
        found: list[float] = []
        for i in (2, 1, 0):
            outputs[i].backward(scalers[i].scale(grad))
            scalers[i].unscale_(optimizers[i])
            grads = [value.grad for value in leaves[i]]
            if inputs[i].grad is not None:
                # An optimizer of the input alone, so that the scaler unscales and judges its gradient as the others.
                scalers[i].unscale_(torch.optim.SGD([inputs[i]]))
                grad = inputs[i].grad
                grads.append(grad)
            from_above = any(found[:1])
            found.insert(0, float(not all(value.isfinite().all() for value in grads)))
            scalers[i].update(scalers[i].get_scale() if from_above else None)
        for optimizer in optimizers:
            if not any(found):
                optimizer.step()
            optimizer.zero_grad()
        trace.append((scales, found))
    return [{name: value.detach() for name, value in own.items()} for own in params], trace
