"""The loop of torch's automatic mixed precision examples, with the model that checkpoints its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import mse_loss

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: mse_loss(model(x), y))
    return values(model), trace
