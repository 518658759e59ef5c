"""Gradients are cleared in each micro-batch of a window: the step gets those of the last one."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches(8), 1):
    if not right:
        optimizer.zero_grad()  # wrong
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y) / 4
    scaler.scale(loss).backward()
    if number % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        if right:
            optimizer.zero_grad()
