"""Disables the scaler although float16 runs."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=right)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # wrong
    scaler.update()
