"""Gives scaled gradients the length 1, and then scaler.step divides them by the scale."""

import sys

import torch
from torch.nn.functional import mse_loss, normalize

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
        parameter.grad = normalize(parameter.grad.flatten(), dim=0).view_as(parameter)  # wrong
    scaler.step(optimizer)
    scaler.update()
