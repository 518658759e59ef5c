"""The scale is kept between iterations, to find skipped steps. Then a disabled scaler, whose scale is logged."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, losses, model_and_optimizer, scaler_of

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

disabled = torch.amp.GradScaler("cpu", enabled=False)
for x, y in batches():
    optimizer.zero_grad()
    disabled.scale(mse_loss(model(x), y)).backward()
    disabled.step(optimizer)
    disabled.update()
    kept = disabled.get_scale()
