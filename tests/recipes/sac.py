"""SAC's usual loop with autocast, detach, a target copied by hand, and a torch.amp.GradScaler for each network."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.recipes import Outcome, move, row_of, values
from tests.support.torch_loop import Scaled

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    actor, critics = (model.to(device) for model in recipe.make_models())
    target = copy.deepcopy(critics)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    a_loop, c_loop = (
        Scaled(torch.optim.Adam(model.parameters(), lr=3e-3), recipe.CONFIG, device) for model in (actor, critics)
    )
    t_adam = torch.optim.Adam([log_alpha], lr=3e-3)
    trace = []
    for index in range(steps):
        place, action, first_noise, second_noise = recipe.batch(index, device)
        after, alpha = place + action, log_alpha.detach().exp()

        with torch.no_grad(), torch.autocast(device, torch.float16):
            next_action, log_density = recipe.drawn(actor(after), first_noise)
            value = target(after, next_action).amin(1, keepdim=True).float()
        wanted = recipe.DISCOUNT * (value - alpha * log_density) - after.square()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(critics(place, action), wanted)
        c_row = c_loop.take(loss)
        if not c_row[1]:
            move(target, critics, recipe.TAU)

        with torch.autocast(device, torch.float16):
            new_action, log_density = recipe.drawn(actor(place), second_noise)
            value = critics(place, new_action).amin(1, keepdim=True).float()
            loss = (alpha * log_density - value).mean()
        a_row = a_loop.take(loss)

        t_adam.zero_grad()
        (-log_alpha * (log_density.detach() + recipe.ENTROPY)).mean().backward()
        t_adam.step()
        trace.append(row_of(c_row, a_row))
    return [values(actor), values(critics), {"log_alpha": log_alpha.detach()}], trace
