"""Differentiates a second loss that is not scaled; the step divides its gradients by the scale."""

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
        outputs = model(x)
        loss = mse_loss(outputs, y)
        penalty = outputs.float().square().mean()
    scaler.scale(loss).backward(retain_graph=True)
    if right:
        scaler.scale(penalty).backward()
    else:
        penalty.backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
