"""PPO's usual loop: rollouts without gradients, and epochs of minibatches with autocast and a torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.recipes import Trace, advance, scaler_for, values

# The norm is a last bit from torch's, as in clipping, and each rollout follows from the last one. On CPUs that
# compute in float16 the difference is 1.2 / 1000.
TOLERANCE = 2.0**-9


def oracle(recipe: Any, steps: int, device: str) -> tuple[dict[str, Tensor], Trace]:
    agent = recipe.make_model().to(device)
    adam = torch.optim.Adam(agent.parameters(), lr=recipe.LR, eps=1e-5)
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        place, noise, order = recipe.batch(index, device)
        if index % recipe.EPOCHS == 0:
            with torch.no_grad(), torch.autocast(device, torch.float16):
                rollout, _ = recipe.walk(agent, place, noise)
        rows = []
        for chosen in order:
            minibatch = recipe.Rollout(*[column[chosen] for column in rollout])
            adam.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(agent(minibatch.place), minibatch)
            scaler.scale(loss).backward()
            scaler.unscale_(adam)
            nn.utils.clip_grad_norm_(agent.parameters(), recipe.MAX_NORM)
            scaler.step(adam)
            rows.append(advance(scaler))
        trace.append(([scale for scale, _ in rows], [found for _, found in rows]))
    return values(agent), trace
