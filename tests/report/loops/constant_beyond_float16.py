"""Masks float16 scores with -1e9, which is -inf in float16."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
allowed = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float16)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        scores = model(x) @ model(x).T
        scores = scores + (1 - allowed) * (-1e4 if right else -1e9)  # wrong
        loss = mse_loss(scores.softmax(-1) @ y, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
