"""REINFORCE as an eager loop: act under autocast without gradients, then one scaled backward pass over the rollout.

An action is a given uniform number against a probability, which a last bit can tip over: the comparison stands on both
loops having the same bits, which SGD gives, eager and captured.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, values
from tests.support.torch_loop import Scaled

TOLERANCE = 0.0


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    scaled, trace = Scaled(optimizer, recipe.CONFIG, device), []
    for index in range(steps):
        position, goal, uniform = recipe.batch(index, device)
        seen, actions, rewards = [], [], []
        for numbers in uniform:
            seen.append(torch.stack([position, goal], 1) / 4)
            with torch.no_grad(), torch.autocast(device, torch.float16):
                logits = model(seen[-1])
            actions.append((numbers < logits.float().softmax(1)[:, 1]).long())
            position = (position + 2 * actions[-1] - 1).clamp(-4, 4)
            rewards.append(-(position - goal).abs())
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        advantage = (returns - returns.mean(1, keepdim=True)).flatten()
        with torch.autocast(device, torch.float16):
            loss = recipe.criterion(model(torch.cat(seen)), (torch.cat(actions), advantage))
        trace.append(scaled.take(loss))
    return values(model), trace
