"""The loop of torch's automatic mixed precision examples around a forward pass that has a no_grad pass in it."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    trace = amp_loop(recipe, optimizer, steps, device, lambda *batch: recipe.criterion(model(*batch[:-1]), batch[-1]))
    return values(model), trace
