"""Updates after unscale_: the step divides by the scale once more."""

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
    if not right:
        scaler.update()
    scaler.step(optimizer)  # wrong
    scaler.update()
