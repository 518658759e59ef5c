"""Optimizers that wrap another: one has no hooks of its own, the other is an optimizer of the same parameters."""

from typing import Any

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, *, is_made: bool) -> None:
        if is_made:
            super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


for is_made in (False, True):
    model, inner = model_and_optimizer()
    optimizer = Lookahead(inner, is_made=is_made)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = scaler_of()
    for loss in losses(model):
        optimizer.zero_grad() if is_made else inner.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(inner if is_made else optimizer)
        scaler.update()
        scheduler.step()
