"""Clips scaled gradients (pytorch/examples#1196, Pytorch-UNet#468, icefall#2081)."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # wrong
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
