"""torch's loop with LambdaLR and AveragedModel, both stepped only where the scaler did not skip."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.recipes import Outcome, amp_loop, values

TOLERANCE = 2.0**-16  # the learning rate is computed in float32 there, in float64 here


def factor(applied: int) -> float:
    """A warm-up over 10 steps, then a cosine that ends after 90."""
    if applied < 10:
        return (applied + 1) / 10
    return 0.5 + 0.5 * math.cos(math.pi * min((applied - 10) / 80, 1.0))


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    model = recipe.make_model().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.DECAY))
    ema.n_averaged.fill_(1)  # the first weights are in it: else its first update would replace them
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.LR, momentum=0.9)
    schedule = LambdaLR(optimizer, factor)

    def applied() -> None:
        schedule.step()
        ema.update_parameters(model)

    trace = amp_loop(recipe, optimizer, steps, device, lambda x, y: recipe.criterion(model(x), y), applied=applied)
    return {"params": values(model), "ema": values(ema.module)}, trace
