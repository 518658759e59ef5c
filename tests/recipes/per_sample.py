"""The loop over samples: a backward pass each, its gradient unscaled and clipped by hand, summed, one step."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, values
from tests.support.torch_loop import advance, scaler_for

# Under vmap a linear layer is a product and then a sum, each rounded to float16; with the bias added like that here too
# it is 0 (tests/examples/test_recipes.py). The largest is that of a bias of one element, near 0.
TOLERANCE = 2.0**-8


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        x, y, noise = recipe.batch(index, device)
        clipped = []
        for one_x, one_y in zip(x.split(1), y.split(1)):
            with torch.autocast(device, torch.float16):
                loss = torch.nn.functional.mse_loss(model(one_x).float(), one_y)
            scaled_grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
            inv_scale = 1.0 / scaler.get_scale()
            grads = [grad * inv_scale for grad in scaled_grads]
            norm = torch.nn.utils.get_total_norm(grads)
            factor = (recipe.MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
            clipped.append([grad * factor for grad in grads])
        for (name, p), column in zip(model.named_parameters(), zip(*clipped)):
            mean = (torch.stack(column).sum(0) + recipe.NOISE * recipe.MAX_NORM * noise[name]) / len(x)
            p.grad = mean * scaler.get_scale()  # step unscales
        scaler.step(optimizer)
        trace.append(advance(scaler))
    return values(model), trace
