"""Runs the forward pass outside of autocast and the backward pass inside."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    if right:
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
    else:
        loss = mse_loss(model(x), y)
        with torch.autocast("cpu", torch.float16):
            scaler.scale(loss).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
