"""DQN's usual loop with autocast, a target moved by hand after every update, and a torch.amp.GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, dict[str, Tensor]], Trace]:
    model = recipe.make_model().to(device)
    target = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        place, action, reward, after, done = recipe.batch(index, device)
        with torch.no_grad(), torch.autocast(device, torch.float16):
            value = target(after).amax(1).float()
        wanted = reward + recipe.DISCOUNT * (1 - done) * value
        adam.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(place), (action, wanted))
        scaler.scale(loss).backward()
        scaler.step(adam)
        trace.append(advance(scaler))
        if not trace[-1][1]:  # as everything else, a target rests in a skipped step
            for old, new in zip(target.parameters(), model.parameters()):
                old.data.lerp_(new.data, recipe.TAU)
    return {"params": values(model), "target": values(target)}, trace
