"""Starts from a parameter that is not finite: each step is skipped."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
if not right:
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
