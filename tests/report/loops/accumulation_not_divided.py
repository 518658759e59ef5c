"""Adds the gradients of four micro-batches and does not divide the mean loss by four."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches(12)):
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    if right:
        loss = loss / 4
    scaler.scale(loss).backward()  # wrong
    if number % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
