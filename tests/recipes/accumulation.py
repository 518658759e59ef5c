"""The loop of torch's examples with gradient accumulation; a window is divided by the number it really holds."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, values
from tests.support.torch_loop import Scaled

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaled, trace = Scaled(optimizer, recipe.CONFIG, device), []
    for index in range(steps):
        losses = []
        for x, y in zip(*recipe.batch(index, device)):
            with torch.autocast(device, torch.float16):
                losses.append(recipe.criterion(model(x), y))
        trace.append(scaled.take(*losses))
    return values(model), trace
