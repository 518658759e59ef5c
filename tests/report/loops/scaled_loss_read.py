"""Logs a loss under the name that was given to the scaled one."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
total = 0.0
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    total += (loss if right else scaled).item()  # wrong
