"""Unscales and clips, and then steps the optimizer itself, so that no step with inf is skipped."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if right:
        scaler.step(optimizer)
    else:
        optimizer.step()  # wrong
    scaler.update()
