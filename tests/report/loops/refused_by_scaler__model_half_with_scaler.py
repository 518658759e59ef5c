"""Casts the model to float16 and uses a scaler (torch raises)."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
if not right:
    model.half()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # wrong
    scaler.update()
