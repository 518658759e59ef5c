"""PPO's usual loop: rollouts without gradients, and epochs of minibatches with autocast and a torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, row_of, values
from tests.support.torch_loop import Scaled

# The norm is a last bit from torch's, as in clipping, and each rollout follows from the last one. On CPUs that
# compute in float16 the difference is 1.2 / 1000.
TOLERANCE = 2.0**-9


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    agent = recipe.make_model().to(device)
    adam = torch.optim.Adam(agent.parameters(), lr=recipe.LR, eps=1e-5)
    scaled, trace = Scaled(adam, recipe.CONFIG, device), []
    for index in range(steps):
        place, noise, order = recipe.batch(index, device)
        if index % recipe.EPOCHS == 0:
            with torch.no_grad(), torch.autocast(device, torch.float16):
                rollout, _ = recipe.walk(agent, place, noise)
        rows = []
        for chosen in order:
            minibatch = recipe.Rollout(*[column[chosen] for column in rollout])
            with torch.autocast(device, torch.float16):
                loss = recipe.criterion(agent(minibatch.place), minibatch)
            rows.append(scaled.take(loss, max_norm=recipe.MAX_NORM))
        trace.append(row_of(*rows))
    return values(agent), trace
