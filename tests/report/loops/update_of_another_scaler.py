"""Steps with one scaler and updates the other (a GAN with two scalers)."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
other = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    other.scale(loss.detach())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if right:
        scaler.update()
    else:
        other.update()  # wrong
