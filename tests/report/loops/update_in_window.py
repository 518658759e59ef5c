"""Updates the scale within a window: its gradients have two scales."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
extra, extra_optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
for number, (x, y) in enumerate(batches(8)):
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y) / 2
        extra_loss = mse_loss(extra(x), y) / 2
    scaler.scale(loss).backward()  # wrong
    scaler.scale(extra_loss).backward()
    ends_window = number % 2 == 1
    if ends_window or not right:
        scaler.step(extra_optimizer)
        extra_optimizer.zero_grad()
    if ends_window:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
    if ends_window or not right:
        scaler.update()
