"""SAC's usual loop with autocast, detach, a target copied by hand, and a torch.amp.GradScaler for each network."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[list[dict[str, Tensor]], Trace]:
    actor, critics = (model.to(device) for model in recipe.make_models())
    target = copy.deepcopy(critics)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    a_adam, c_adam, t_adam = (
        torch.optim.Adam(params, lr=3e-3) for params in (actor.parameters(), critics.parameters(), [log_alpha])
    )
    a_scaler, c_scaler = scaler_for(recipe.CONFIG, device), scaler_for(recipe.CONFIG, device)
    trace = []
    for index in range(steps):
        place, action, first_noise, second_noise = recipe.batch(index, device)
        after, alpha = place + action, log_alpha.detach().exp()

        with torch.no_grad(), torch.autocast(device, torch.float16):
            next_action, log_density = recipe.drawn(actor(after), first_noise)
            value = target(after, next_action).amin(1, keepdim=True).float()
        wanted = recipe.DISCOUNT * (value - alpha * log_density) - after.square()
        c_adam.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(critics(place, action), wanted)
        c_scaler.scale(loss).backward()
        c_scaler.step(c_adam)
        rows = [advance(c_scaler)]
        if not rows[0][1]:  # as everything else, a target rests in a skipped step
            for old, new in zip(target.parameters(), critics.parameters()):
                old.data.lerp_(new.data, recipe.TAU)

        a_adam.zero_grad()
        with torch.autocast(device, torch.float16):
            new_action, log_density = recipe.drawn(actor(place), second_noise)
            value = critics(place, new_action).amin(1, keepdim=True).float()
            loss = (alpha * log_density - value).mean()
        a_scaler.scale(loss).backward()
        a_scaler.step(a_adam)
        rows.append(advance(a_scaler))

        t_adam.zero_grad()
        (-log_alpha * (log_density.detach() + recipe.ENTROPY)).mean().backward()
        t_adam.step()
        trace.append(([scale for scale, _ in rows], [found for _, found in rows]))
    return [values(actor), values(critics), {"log_alpha": log_alpha.detach()}], trace
