"""The scale is kept between iterations, to find skipped steps."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
scaler = scaler_of(2.0**126)
kept = scaler.get_scale()
for loss in losses(model, 12):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scale = scaler.get_scale()
    if scale >= kept:
        scheduler.step()
    kept = scale
