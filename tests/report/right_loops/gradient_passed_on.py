"""Scaled gradients that begin another backward pass, and losses that are multiplied by a scaled one."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
head, head_optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        hidden = model(x)
    detached = hidden.detach().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(detached.float(), y)
    scaler.scale(loss).backward()
    hidden.backward(detached.grad)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

for loss in losses(model):
    optimizer.zero_grad()
    (loss * scaler.scale(torch.ones(()))).backward()
    scaler.step(optimizer)
    scaler.update()
