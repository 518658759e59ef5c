"""Scales losses of bfloat16, which needs no scaler (harmless)."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
dtype = torch.float16 if right else torch.bfloat16
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # wrong
    scaler.update()
