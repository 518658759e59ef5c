"""Disables the scaler although float16 runs."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=right)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # wrong
    scaler.update()
