"""An optimizer that wraps another and has no hooks of its own, with a scheduler."""

from typing import Any

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


model, inner = model_and_optimizer()
optimizer = Lookahead(inner)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
