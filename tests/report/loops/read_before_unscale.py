"""Logs the norm of scaled gradients."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += parameter.grad.norm(2).item() ** 2  # wrong
    norm = squares**0.5
    scaler.step(optimizer)
    scaler.update()
