"""Steps after each micro-batch and clears the gradients only after two."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches(8)):
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss / 2).backward()  # wrong
    ends_window = number % 2 == 1
    if ends_window or not right:
        scaler.step(optimizer)
        scaler.update()
    if ends_window:
        optimizer.zero_grad()
