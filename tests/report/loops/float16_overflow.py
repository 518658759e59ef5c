"""Sums squares in float16, which ends at 65504."""

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
        outputs = 100 * model(x)
        large = outputs.float() if right else outputs
        squares = (large * large).sum() * 1e4  # wrong
        loss = mse_loss(outputs.float(), y) + 1e-9 * squares
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
