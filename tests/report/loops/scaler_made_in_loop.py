"""Makes the scaler anew in each step: the scale starts over."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for x, y in batches():
    if not right:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # wrong
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
