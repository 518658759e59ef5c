"""The loop of torch's examples with a model that holds more than matrices; torch keeps a skipped step's buffers."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    torch.manual_seed(1)
    trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: recipe.criterion(model(x), y))
    return {"params": values(model), "buffers": dict(model.named_buffers())}, trace
