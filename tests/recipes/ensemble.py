"""The members trained one after another, each with an optimizer and a scaler of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.recipes import Outcome, amp_loop, row_of, values

# Under vmap a linear layer is a batched product and then a sum, each rounded to float16; with the bias added like that
# here too it is 0 (tests/examples/test_recipes.py).
TOLERANCE = 2.0**-9


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    def train(seed: int, init_scale: float) -> Outcome:
        model = recipe.make_model(seed).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
        config = replace(recipe.CONFIG, init_scale=init_scale)
        trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: recipe.criterion(model(x), y), config=config)
        return values(model), trace

    members, traces = zip(*[train(seed, scale) for seed, scale in enumerate(recipe.INIT_SCALES)])
    params = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    return params, [row_of(*rows) for rows in zip(*traces)]
