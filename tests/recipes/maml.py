"""The tasks one after another, each with an inner step that is differentiated through, as functional_call has it."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import mse_loss

from tests.recipes import Outcome, values
from tests.support.torch_loop import Scaled

# Under vmap a linear layer is a batched product and then a sum, each rounded to float16; with layers that are so in
# both it is 0 (tests/examples/test_recipes.py).
TOLERANCE = 2.0**-9


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaled, trace = Scaled(optimizer, recipe.CONFIG, device), []
    for index in range(steps):
        losses = []
        for support_x, support_y, query_x, query_y in zip(*recipe.batch(index, device)):
            with torch.autocast(device, torch.float16):
                loss = mse_loss(functional_call(model, params, support_x).float(), support_y)
            scaled_grads = torch.autograd.grad(scaled.scaler.scale(loss), list(params.values()), create_graph=True)
            inv_scale = 1.0 / scaled.scaler.get_scale()
            fast = {
                name: p - recipe.INNER_LR * grad * inv_scale for (name, p), grad in zip(params.items(), scaled_grads)
            }
            with torch.autocast(device, torch.float16):
                losses.append(mse_loss(functional_call(model, fast, query_x).float(), query_y))
        trace.append(scaled.take(torch.stack(losses).mean()))
    return values(model), trace
