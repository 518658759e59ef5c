"""TD3's usual loop with autocast, detach, targets copied by hand, and a torch.amp.GradScaler for each network."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.recipes import Outcome, move, row_of, values
from tests.support.torch_loop import Scaled

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    actor, critics = (model.to(device) for model in recipe.make_models())
    a_target, c_target = copy.deepcopy(actor), copy.deepcopy(critics)
    a_loop, c_loop = (
        Scaled(torch.optim.Adam(model.parameters(), lr=3e-3), recipe.CONFIG, device) for model in (actor, critics)
    )
    trace, applied = [], 0
    for index in range(steps):
        rows = []
        for place, action, noise in zip(*recipe.batch(index, device)):
            after = place + action
            with torch.no_grad(), torch.autocast(device, torch.float16):
                next_action = (a_target(after) + noise).clamp(-1, 1)
                value = c_target(after, next_action).amin(1, keepdim=True)
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(critics(place, action), recipe.DISCOUNT * value.float() - after.square())
            rows.append(c_loop.take(loss))
            if not rows[-1][1]:
                applied += 1
                if applied % 2 == 0:
                    move(c_target, critics, recipe.TAU)
        with torch.autocast(device, torch.float16):
            loss = -critics(place, actor(place))[:, 0].float().mean()
        rows.append(a_loop.take(loss))
        if not rows[-1][1]:
            move(a_target, actor, recipe.TAU)
        trace.append(row_of(*rows))
    return [values(actor), values(critics)], trace
