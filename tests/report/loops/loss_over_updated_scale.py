"""Divides the scaled loss by the scale after the update, to log it."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    if right:
        logged = loss.item()
    else:
        logged = scaled.item() / scaler.get_scale()  # wrong
