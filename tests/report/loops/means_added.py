"""Adds the mean losses of the micro-batches of an inner loop: right for domains, not for micro-batches."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for _ in range(3):
    optimizer.zero_grad()
    for x, y in batches(4):
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(x), y)
        if right:
            loss = loss / 4
        scaler.scale(loss).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
