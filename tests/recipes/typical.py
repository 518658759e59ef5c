"""The loop of torch's automatic mixed precision examples."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 2.0**-13


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: recipe.criterion(model(x), y))
    return values(model), trace
