"""Replaces inf and NaN in scaled gradients, as NVlabs/stylegan3 does without a scaler: no step is skipped."""

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
        torch.nan_to_num(parameter.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=parameter.grad)  # wrong
    scaler.step(optimizer)
    scaler.update()
