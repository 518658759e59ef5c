"""The members trained one after another, each with an optimizer and a scaler of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, values

# Under vmap a linear layer is a batched product and then a sum, each rounded to float16; with the bias added like that
# here too it is 0 (tests/examples/test_recipes.py).
TOLERANCE = 2.0**-9


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    trained, traces = [], []
    for seed, init_scale in enumerate(recipe.INIT_SCALES):
        model = recipe.make_model(seed).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
        scaler = torch.amp.GradScaler(device, init_scale, growth_interval=recipe.CONFIG.growth_interval)
        trace = []
        for index in range(steps):
            x, y = recipe.batch(index, device)
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            trace.append(advance(scaler))
        trained.append(values(model))
        traces.append(trace)
    params = {name: torch.stack([member[name] for member in trained]) for name in trained[0]}
    return params, [([scale for scale, _ in row], [found for _, found in row]) for row in zip(*traces)]
