"""TD3's usual loop with autocast, detach, targets copied by hand, and a torch.amp.GradScaler for each network."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> tuple[list[dict[str, Tensor]], Trace]:
    actor, critics = (model.to(device) for model in recipe.make_models())
    a_target, c_target = copy.deepcopy(actor), copy.deepcopy(critics)
    a_adam, c_adam = (torch.optim.Adam(model.parameters(), lr=3e-3) for model in (actor, critics))
    a_scaler, c_scaler = scaler_for(recipe.CONFIG, device), scaler_for(recipe.CONFIG, device)

    def move(target: nn.Module, model: nn.Module) -> None:
        for old, new in zip(target.parameters(), model.parameters()):
            old.data.lerp_(new.data, recipe.TAU)

    trace, applied = [], 0
    for index in range(steps):
        rows = []
        for place, action, noise in zip(*recipe.batch(index, device)):
            after = place + action
            with torch.no_grad(), torch.autocast(device, torch.float16):
                next_action = (a_target(after) + noise).clamp(-1, 1)
                value = c_target(after, next_action).amin(1, keepdim=True)
            c_adam.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(critics(place, action), recipe.DISCOUNT * value.float() - after.square())
            c_scaler.scale(loss).backward()
            c_scaler.step(c_adam)
            rows.append(advance(c_scaler))
            if not rows[-1][1]:  # as everything else, a target rests in a skipped step
                applied += 1
                if applied % 2 == 0:
                    move(c_target, critics)
        a_adam.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = -critics(place, actor(place))[:, 0].float().mean()
        a_scaler.scale(loss).backward()
        a_scaler.step(a_adam)
        rows.append(advance(a_scaler))
        if not rows[-1][1]:
            move(a_target, actor)
        trace.append(([scale for scale, _ in rows], [found for _, found in rows]))
    return [values(actor), values(critics)], trace
