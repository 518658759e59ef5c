"""DQN's usual loop with autocast, a target moved by hand after every update, and a torch.amp.GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.recipes import Outcome, amp_loop, move, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    target = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(place: Tensor, action: Tensor, reward: Tensor, after: Tensor, done: Tensor) -> Any:
        with torch.no_grad():
            value = target(after).amax(1).float()
        wanted = reward + recipe.DISCOUNT * (1 - done) * value
        return recipe.criterion(model(place), (action, wanted))

    trace = amp_loop(recipe, adam, steps, device, loss_of, applied=lambda: move(target, model, recipe.TAU))
    return {"params": values(model), "target": values(target)}, trace
