"""Steps a scheduler of its own although every step is skipped."""

import sys
from typing import Any

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of


class Halving(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        return [base * 0.5**self.last_epoch for base in self.base_lrs]

    def step(self, epoch: Any = None) -> None:
        super().step(epoch)


right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scheduler = Halving(optimizer)
scaler = scaler_of(2.0**10 if right else 2.0**60)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # wrong
