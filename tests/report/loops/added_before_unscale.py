"""Adds the sign of the weights to scaled gradients, a penalty for pruning (network slimming)."""

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
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.add_(1e-4 * torch.sign(parameter.data))  # wrong
    scaler.step(optimizer)
    scaler.update()
