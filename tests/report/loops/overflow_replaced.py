"""Replaces inf and NaN in scaled gradients, as NVlabs/stylegan3 does without a scaler: no step is skipped."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.nan_to_num(parameter.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=parameter.grad)  # wrong
    scaler.step(optimizer)
    scaler.update()
