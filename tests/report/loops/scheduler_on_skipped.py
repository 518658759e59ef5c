"""Steps the scheduler although the optimizer's step was skipped (Lightning#18828, pytorch#55585)."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
applied: list[bool] = []
optimizer.register_step_post_hook(lambda *_: applied.append(True))
for loss in losses(model):
    optimizer.zero_grad()
    applied.clear()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if applied or not right:
        scheduler.step()  # wrong
