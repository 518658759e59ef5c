"""Makes the scaler anew in each step: the scale starts over."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for loss in losses(model):
    if not right:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # wrong
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
